"""When delayed scaling's scales move: once a forward, at the exit of its FP8 context, and once a backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.calls import Call, Calls, CheckpointedCalls
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import AmaxGroup
from thunder_te_exec.weight_cache import WeightCache

__all__ = ["BackwardSync", "Fp8ForwardContext", "ScaleUpdate", "differentiable_once"]

_DIFFERENTIABLE_ONCE = (
    "backward with create_graph=True through a function of thunder.jit(executors=[te_ex]): it is differentiable once, "
    "and gradients of its gradients would be missing; call it without create_graph, or run what needs second "
    "derivatives outside of thunder.jit"
)

_OTHER_CONTEXT = (
    "torch.utils.checkpoint runs a function of thunder.jit(executors=[te_ex]) again in backward under another recipe "
    "than in forward: call backward in the FP8 context of the forward"
)


class ScaleUpdate:
    """Takes the amaxes of all tensors of one kind into their scales; where the recipe says so, over all processes.

    Args:
        settings: recipe, backend, and the process group to reduce over.
        groups: the function's groups of that kind; later compilations add to the list. All are updated, as Transformer
            Engine updates all modules that it has seen: a tensor that this call did not quantize has an amax of zero.
    """

    def __init__(self, settings: Settings, groups: list[AmaxGroup]) -> None:
        self._recipe, self._backend = settings.recipe, settings.backend
        self._process_group = settings.amax_reduction_group
        self.groups = groups
        self._ordered: tuple[list[AmaxGroup], torch.Tensor] | None = None

    def __call__(self) -> None:
        if self._recipe.reduce_amax and _is_distributed(self._process_group):
            self._reduce()
        for group in self.groups:
            self._backend.update_scales(group, self._recipe)
            group.scale_changed()
            group.updates += 1

    def take_noted(self) -> None:
        """Raise the amaxes to those that kernels of a fuser computed."""
        for group in self.groups:
            group.take_noted()

    def _reduce(self) -> None:
        order = self._order()
        amaxes = torch.cat([group.history[0] for group in self.groups])
        reduced = amaxes[order]
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=self._process_group)
        amaxes[order] = reduced
        rows = [group.history[0] for group in self.groups]
        torch._foreach_copy_(rows, list(amaxes.split([row.numel() for row in rows])))

    def _order(self) -> torch.Tensor:
        """Order of all tensors, int64 (tensors,), that does not depend on what a process happened to compile first."""
        if self._ordered is None or self._ordered[0] != self.groups:
            keys = [key for group in self.groups for key in group.keys]
            order = sorted(range(len(keys)), key=lambda i: (keys[i].linear, keys[i].role.name))
            self._ordered = list(self.groups), torch.tensor(order, device=self.groups[0].scale.device)
        return self._ordered[1]


def _is_distributed(process_group: Any) -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


class Fp8ForwardContext:
    """The FP8 context that a forward trace runs in; the trace shows it as ``te_fp8_recipe``.

    On exit it updates the forward's scales. That the recipe is the active one was seen to when thunder chose the trace
    (``thunder_te_exec.cache``).

    Args:
        calls: gets the forward call on entry.
        updates: the forward's scale updates.
        recipes: which of the function's recipes it is for, by their numbers.
        recomputes: whether backward runs a linear of this forward again, with its scales.
        checkpointed: tells a run that ``torch.utils.checkpoint`` makes in backward, which takes its first run's scales
            and moves none.
        weights: where quantized weights on CUDA devices are kept, which a captured graph reads.
        backward_updates: the backward's scale updates, where linears are on CUDA devices.
    """

    def __init__(
        self,
        calls: Calls,
        updates: Sequence[ScaleUpdate],
        *,
        recipes: tuple[int, ...],
        recomputes: bool,
        checkpointed: CheckpointedCalls,
        weights: Sequence[WeightCache] = (),
        backward_updates: Sequence[ScaleUpdate] | None = None,
    ) -> None:
        self._calls, self._updates, self._recomputes = calls, tuple(updates), recomputes
        self._recipes, self._checkpointed, self._weights = recipes, checkpointed, tuple(weights)
        self._on_cuda, self._backward_updates = backward_updates is not None, tuple(backward_updates or ())

    def decorate(self, computation: Callable[..., Any]) -> Callable[..., Any]:
        """``computation`` inside this context."""

        @functools.wraps(computation)
        def in_fp8(*args: Any, **kwargs: Any) -> Any:
            run = self._checkpointed.run()
            if run.again and run.call.recipes != self._recipes:
                raise RuntimeError(_OTHER_CONTEXT)
            run.call.recipes = self._recipes
            capturing = self._on_cuda and torch.cuda.is_current_stream_capturing()
            if capturing:
                self._begin_capture()
            self._calls.forward, self._calls.again = run.call, run.again
            out = computation(*args, **kwargs)
            self.take_noted()
            # As te.autocast: what runs without gradients does not move the scales.
            if run.gradients and not run.again:
                self._update(run.call, remember=self._recomputes or run.checkpointed)
            if capturing:
                for weight in self._weights:
                    weight.hold()
            return out

        return in_fp8

    @property
    def call(self) -> Call:
        """The forward call that is under way."""
        return self._calls.forward

    @property
    def runs_again(self) -> bool:
        """Whether it is a second run of a call."""
        return self._calls.again

    def take_noted(self) -> None:
        """Raise the forward's amaxes to those that kernels of a fuser computed."""
        for update in self._updates:
            update.take_noted()

    def held_weights(self) -> list[Any]:
        """The quantized weights that a graph of the forward reads, for as long as it is replayed."""
        return [weight.kept for weight in self._weights]

    def _begin_capture(self) -> None:
        # What an exception left would be taken in the graph, which would read it in each replay.
        for update in (*self._updates, *self._backward_updates):
            for group in update.groups:
                group.drop_noted()

    def _update(self, call: Call, *, remember: bool) -> None:
        for update in self._updates:
            if remember:
                call.forward_scales.update({group: group.scale.clone() for group in update.groups})
                call.forward_updates.update({group: group.updates for group in update.groups})
            update()


def differentiable_once() -> None:
    """The implementation of ``te_differentiable_once``: backward with ``create_graph=True`` raises when it ends."""
    compat.raise_after_backward_with_create_graph(_DIFFERENTIABLE_ONCE)


class BackwardSync:
    """The implementation of ``te_sync_fp8_meta_bwd``: updates the gradients' scales, once for each forward call.

    Does what ``te_differentiable_once`` does too.
    """

    def __init__(self, calls: Calls, updates: Sequence[ScaleUpdate]) -> None:
        self._calls, self._updates = calls, tuple(updates)

    def __call__(self) -> None:
        differentiable_once()
        self._calls.end_backward(self._update)

    def _update(self, call: Call) -> None:
        if call.backward_scales:
            return
        for update in self._updates:
            update.take_noted()
            call.backward_scales.update({group: group.scale.clone() for group in update.groups})
            update()
