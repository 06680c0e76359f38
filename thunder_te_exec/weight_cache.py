"""A weight is quantized once for as long as it does not change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from thunder_te_exec.backends import Operand, Quantize

__all__ = ["WeightCache"]


class WeightCache:
    """The FP8 operand of one linear's weight, for gradient accumulation: one quantization an optimizer step.

    It is made again when the weight is another tensor, has another storage, or was written to in place, which torch
    counts (``Tensor._version``): by an optimizer, ``copy_`` or ``load_state_dict``. What is written through ``.data``,
    which torch does not count, is not seen.
    """

    def __init__(self) -> None:
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._state: tuple[int, int] | None = None
        self._operand: Operand | None = None

    def find(self, weight: torch.Tensor, columnwise: bool) -> Operand | None:
        """The operand of ``weight`` as it is now, or None."""
        if self._operand is None or self._weight() is not weight or self._state != _state(weight):
            return None
        return None if columnwise and self._operand.columnwise is None else self._operand

    def get(self, weight: torch.Tensor, columnwise: bool, quantize: Sequence[Quantize]) -> Operand:
        """The operand of ``weight``, quantized by ``quantize[columnwise]`` where there is none."""
        operand = self.find(weight, columnwise)
        if operand is None:
            operand = quantize[columnwise](weight.contiguous())
            if not weight.is_inference():  # an inference tensor counts no writes
                self._weight, self._state, self._operand = weakref.ref(weight), _state(weight), operand
        return operand


def _state(weight: torch.Tensor) -> tuple[int, int]:
    return weight._version, weight.data_ptr()
