"""Forward calls of a jitted function, as their backwards and their recomputations remember them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from thunder_te_exec import compat

__all__ = ["Call", "Calls", "CheckpointedCalls", "Run"]


class Call:
    """One forward call of a function, as its backward remembers it.

    Attributes:
        recipes: which of the function's recipes it ran under, by their numbers.
        forward_scales: by group, the scales that the forward was quantized with, where it may run again.
        forward_updates: by group, how often these had been computed anew by then.
        backward_scales: by group, the scales that gradients were quantized with; empty until a backward has run.
        random_states: by linear, the device's random state when its gradient was rounded stochastically.
        graph_replays: by region, which replay of its CUDA graph the forward was (``cuda_graph_transform``).
    """

    __slots__ = ("backward_scales", "forward_scales", "forward_updates", "graph_replays", "random_states", "recipes")

    def __init__(self) -> None:
        self.recipes: tuple[int, ...] = ()
        self.forward_scales: dict[Any, torch.Tensor] = {}
        self.forward_updates: dict[Any, int] = {}
        self.backward_scales: dict[Any, torch.Tensor] = {}
        self.random_states: dict[Any, torch.Tensor] = {}
        self.graph_replays: dict[str, int] = {}


class Calls(threading.local):
    """Which call of a compiled function runs in this thread: ``forward`` its forward, ``backward`` its backward.

    ``again``: the forward is a second run of that call, which quantizes with its scales and records nothing.
    """

    forward: Call | None = None
    again: bool = False
    backward: Call | None = None
    _ends_first: bool = False
    _at_its_end: Callable[[Call], None] | None = None

    @property
    def repeated(self) -> Call | None:
        """The call that the forward is a second run of."""
        return self.forward if self.again else None

    def begin_backward(self, call: Call) -> None:
        """A linear's backward runs, of ``call``."""
        self.backward = call
        if self._at_its_end is not None:
            update, self._at_its_end = self._at_its_end, None
            compat.after_backward(lambda _: update(call))

    def end_backward(self, update: Callable[[Call], None]) -> None:
        """``update(call)`` for the backward that has run.

        A fuser that orders symbols by their data alone puts what reads nothing first: then, for the one that runs next,
        when all of backward has.
        """
        self._ends_first = self._ends_first or self.backward is None
        if self._ends_first:
            self._at_its_end = update
        else:
            update(self.backward)


class Run(NamedTuple):
    """A run of a function's forward: of which call, whether inside ``torch.utils.checkpoint``, and whether again.

    ``gradients``: whether its gradients are computed, at once or, in the first run of a reentrant checkpoint, later.
    """

    call: Call
    checkpointed: bool
    again: bool
    gradients: bool


class CheckpointedCalls:
    """The calls of one jitted function under each ``torch.utils.checkpoint``, so that a second run finds its first."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, _OfCheckpoint] = weakref.WeakKeyDictionary()
        self._known = _Known()

    @contextmanager
    def inside(self, checkpoint_run: compat.CheckpointRun) -> Iterator[None]:
        """Runs in here are of ``checkpoint_run``: where gradients are switched on, it would not be seen."""
        self._known.run = checkpoint_run
        try:
            yield
        finally:
            self._known.run = None

    def run(self) -> Run:
        """The run that begins now.

        Raises:
            RuntimeError: a checkpoint calls the function more often in backward than it did at first.
        """
        under_way = self._known.run or compat.checkpoint_under_way()
        gradients = torch.is_grad_enabled()
        if under_way is None:
            return Run(Call(), checkpointed=False, again=False, gradients=gradients)
        calls = self._of.setdefault(under_way.checkpoint, _OfCheckpoint())
        if under_way.recomputation is None:
            return Run(calls.first(), checkpointed=True, again=False, gradients=gradients or under_way.reentrant)
        return Run(calls.next_of(under_way.recomputation), checkpointed=True, again=True, gradients=gradients)


class _Known(threading.local):
    run: compat.CheckpointRun | None = None


class _OfCheckpoint:
    """The calls that were made under one checkpoint, in order, and how many of them the latest second run repeated."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._recomputation: Any = None
        self._repeated = 0

    def first(self) -> Call:
        self._calls.append(Call())
        return self._calls[-1]

    def next_of(self, recomputation: Any) -> Call:
        # A run that is not told from the one before repeats all calls: it begins where that ended.
        if self._recomputation is not recomputation or self._repeated == len(self._calls):
            self._recomputation, self._repeated = recomputation, 0
        if not self._calls:
            raise RuntimeError(
                "torch.utils.checkpoint calls a function of thunder.jit(executors=[te_ex]) in backward that it did "
                "not call in FP8 in forward: call backward in the FP8 context of the forward"
            )
        self._repeated += 1
        return self._calls[self._repeated - 1]
