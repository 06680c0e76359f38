"""What a CUDA graph reads where its capture found it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from thunder_te_exec.fp8_weight import Fp8Weight

__all__ = ["Pin"]


class Pin(NamedTuple):
    """A parameter or buffer as it was when a graph was captured that reads it.

    Attributes:
        tensor: that one.
        read: what the graph reads of it: itself, or the numbers of one that is held in FP8.
        address: where that lay.
        version: how often the tensor had been written to (``Tensor._version``), where the graph reads what it was
            quantized to; else None.
        requires_grad: whether the tensor wanted a gradient.
    """

    tensor: torch.Tensor
    read: torch.Tensor
    address: int
    version: int | None
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, *, quantized_once: bool) -> Pin:
        """``quantized_once``: the graph reads FP8 numbers that are kept while the tensor does not change."""
        read = tensor.operand.rowwise[0] if isinstance(tensor, Fp8Weight) else tensor
        version = tensor._version if quantized_once and read is tensor else None
        return cls(tensor, read, read.data_ptr(), version, tensor.requires_grad)

    def change(self, now: torch.Tensor | None) -> str:
        """What makes ``now``, what is there now, another thing to a graph than what was there; empty where nothing."""
        if now is not self.tensor:
            return "is another tensor"
        if self.read.data_ptr() != self.address:
            return "has other memory"
        if self.version is not None and now._version != self.version:
            return "was written to, which is frozen and was quantized before,"
        return "" if now.requires_grad == self.requires_grad else "was frozen or unfrozen"
