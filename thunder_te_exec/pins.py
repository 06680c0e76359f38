"""What a CUDA graph reads where its capture found it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from thunder_te_exec.fp8_weight import Fp8Weight

__all__ = ["Pin"]


class Pin(NamedTuple):
    """A tensor as it was when a graph was captured that reads it.

    Attributes:
        tensor: a parameter, or of one that is held in FP8 its numbers.
        address: where it lay.
        version: how often it had been written to (``Tensor._version``), where the graph reads what it was quantized to;
            else None.
    """

    tensor: torch.Tensor
    address: int
    version: int | None

    @classmethod
    def of(cls, parameter: torch.Tensor, *, quantized_once: bool) -> Pin:
        """``quantized_once``: the graph reads FP8 numbers that are kept while the parameter does not change."""
        if isinstance(parameter, Fp8Weight):  # which is read itself
            return cls(parameter.operand.rowwise[0], parameter.operand.rowwise[0].data_ptr(), None)
        return cls(parameter, parameter.data_ptr(), parameter._version if quantized_once else None)

    @property
    def has_moved(self) -> bool:
        return self.tensor.data_ptr() != self.address

    @property
    def was_written_to(self) -> bool:
        return self.version is not None and self.tensor._version != self.version
