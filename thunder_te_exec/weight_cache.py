"""A weight is quantized once for as long as it does not change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from thunder_te_exec.backends import Matrix, Operand, Quantize

__all__ = ["OptimizerSteps", "WeightCache"]


class OptimizerSteps:
    """Counts the steps of all torch optimizers: fused ones write to weights without torch counting it."""

    def __init__(self) -> None:
        self.count = 0
        this = weakref.ref(self)

        def step(*_: object) -> None:
            counter = this()
            if counter is not None:
                counter.count += 1

        weakref.finalize(self, register_optimizer_step_post_hook(step).remove)


class WeightCache:
    """The FP8 operand of one linear's weight, for gradient accumulation: one quantization an optimizer step.

    It is made again after any optimizer's step, and when the weight is another tensor, has another storage, or was
    written to in place, which torch counts (``Tensor._version``): by ``copy_`` or ``load_state_dict``. What is written
    through ``.data``, which torch does not count, is not seen.

    Args:
        steps: counts optimizer steps.
        one_scale: whether the whole weight has one scale, so that either direction is the other's transpose.
    """

    def __init__(self, steps: OptimizerSteps, *, one_scale: bool) -> None:
        self._steps, self._one_scale = steps, one_scale
        self._weight: weakref.ref[torch.Tensor] | None = None
        self._state: tuple[int, int, int] | None = None
        self._operand: Operand | None = None

    def get(self, weight: torch.Tensor, columnwise: bool, quantize: Sequence[Quantize]) -> Operand:
        """The operand of ``weight``, quantized by ``quantize[columnwise]`` where it has changed."""
        if weight.is_inference():  # it counts no writes
            return quantize[columnwise](weight.contiguous())
        state = (self._steps.count, weight._version, weight.data_ptr())
        if self._operand is None or self._weight() is not weight or self._state != state:
            self._operand = quantize[columnwise](weight.contiguous())
            self._weight, self._state = weakref.ref(weight), state
        elif columnwise and self._operand.columnwise is None:
            self._operand = self._operand._replace(columnwise=self._other_direction(weight, quantize))
        return self._operand

    def _other_direction(self, weight: torch.Tensor, quantize: Sequence[Quantize]) -> Matrix:
        if not self._one_scale:
            return quantize[True](weight.contiguous()).columnwise  # the same bits as if it had been asked for at once
        # Whatever the scale is by now: under delayed scaling it may have moved.
        data, scale_inv = self._operand.rowwise
        return data.t().contiguous(), scale_inv
