"""A weight is quantized once for as long as it does not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from thunder_te_exec import compat
from thunder_te_exec.backends import Matrix, Operand, Quantize
from thunder_te_exec.calls import Call
from thunder_te_exec.state import AmaxSlot

__all__ = ["OptimizerSteps", "WeightCache"]


class OptimizerSteps:
    """Counts the steps in which torch optimizers may have written to a weight: fused ones write without torch counting.

    A parameter that is frozen and has no gradient left from before is not written to: it has no steps.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        this = weakref.ref(self)

        def step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            steps = this()
            if steps is not None:
                steps._count(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(step).remove)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._counts and (p.requires_grad or p.grad is not None):
                    self._counts[id(p)] += 1

    def of(self, weight: torch.Tensor) -> int:
        """How many there were, of any optimizer that has ``weight``, since it was first asked for."""
        return self._counts.setdefault(id(weight), 0)


class _Kept(NamedTuple):
    """A quantized weight, what it was made of, after which update of its scale, and whether that knew its amax."""

    operand: Operand
    storage: weakref.ref[torch.UntypedStorage]
    state: tuple[Any, ...]
    made_at: int
    provisional: bool


class WeightCache:
    """The FP8 operand of one linear's weight: of a frozen one kept for good, of a trained one for an optimizer step.

    It is made again after a step of an optimizer that has the weight, and when the weight has another storage or was
    written to in place, which torch counts (``Tensor._version``): by ``copy_`` or ``load_state_dict``. What is written
    through ``.data``, which torch does not count, is not seen.

    While a CUDA graph is captured nothing new is kept: what is made then has numbers only when the graph has run. A
    trained weight is quantized by the graph, in each replay, and from then on in each call: the graph may hold the
    optimizer's step too, of which nothing shows here.

    Args:
        steps: counts optimizer steps.
        transpose: makes the column-wise matrix from the row-wise one; None where only a quantizer can.
        slot: of the weight under delayed scaling, else None. A frozen weight is quantized once more when the scale has
            been computed from its amax, and not again: its scale is the same in every later step.

    Attributes:
        frozen: whether the weight was frozen when the function was last compiled for it.
    """

    def __init__(
        self, steps: OptimizerSteps, *, transpose: Callable[[Matrix], Matrix] | None, slot: AmaxSlot | None
    ) -> None:
        self._steps, self._transpose, self._slot = steps, transpose, slot
        self._group = None if slot is None else slot.group
        # Read and written as a whole, so that threads which call a function see one state of it.
        self._kept: _Kept | None = None
        self._in_graphs: list[_Kept] = []
        self._quantized_by_graphs = False
        self.frozen = False

    @property
    def kept(self) -> Any:
        """What is kept now, to be held on to."""
        return self._kept

    def hold(self) -> None:
        """A CUDA graph that has been captured reads the operand: let its memory live as long as this."""
        kept = self._kept
        if kept is not None and not any(kept is held for held in self._in_graphs):
            self._in_graphs.append(kept)

    def forget(self) -> None:
        """Quantize the weight anew when it is next asked for."""
        self._kept = None

    def get(
        self,
        weight: torch.Tensor,
        columnwise: bool,
        quantize: Sequence[Quantize],
        trace: object,
        *,
        again: Call | None = None,
    ) -> Operand:
        """The operand of ``weight``, quantized by ``quantize[columnwise]`` where it has changed.

        Args:
            weight: (out_features, in_features).
            columnwise: whether the column-wise copy is wanted too.
            quantize: quantizers without and with the column-wise copy.
            trace: stands for the compiled trace that asks. A frozen weight is made anew when another one did before:
                what makes a program take another path, such as peft's merging, may have written to it.
            again: the call that runs again, where one does: ``quantize`` has the scales of that call then, and what it
                gives is not kept.
        """
        if weight.is_inference():  # it counts no writes
            return quantize[columnwise](weight.contiguous())
        if torch.is_inference_mode_enabled():  # what is made in it could not be saved for a backward
            with torch.inference_mode(False), torch.no_grad():
                return self.get(weight, columnwise, quantize, trace, again=again)
        capturing = compat.is_captured(weight)
        self._quantized_by_graphs = self._quantized_by_graphs or (capturing and weight.requires_grad)
        if self._quantized_by_graphs and weight.requires_grad:
            return quantize[columnwise](weight.contiguous())
        kept = self._kept
        storage = weight.untyped_storage()
        who = None if weight.requires_grad else id(trace)
        state = (self._steps.of(weight), weight._version, weight.data_ptr(), weight.requires_grad, who)
        changed = kept is None or kept.storage() is not storage or kept.state != state
        settles = not changed and kept.provisional and self._updates() > kept.made_at
        made_later = not changed and again is not None and kept.made_at > again.forward_updates.get(self._group, 0)
        if changed or settles or made_later:
            operand = quantize[columnwise](weight.contiguous())
            if again is None and not capturing:
                provisional = self._slot is not None and not weight.requires_grad and not settles
                self._kept = _Kept(operand, weakref.ref(storage), state, self._updates(), provisional)
            return operand
        if columnwise and kept.operand.columnwise is None:
            other = self._other_direction(kept.operand, weight, quantize)
            kept = kept._replace(operand=kept.operand._replace(columnwise=other))
            if not capturing:
                self._kept = kept
        return kept.operand

    def _updates(self) -> int:
        return 0 if self._group is None else self._group.updates

    def _other_direction(self, operand: Operand, weight: torch.Tensor, quantize: Sequence[Quantize]) -> Matrix:
        if self._transpose is None:
            return quantize[True](weight.contiguous()).columnwise  # the same bits as if it had been asked for at once
        # Whatever the scale is by now: under delayed scaling it may have moved.
        return self._transpose(operand.rowwise)
