"""A pipeline's schedule: in which order forwards, backwards and delayed weight gradients of model chunks run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

__all__ = ["Replays", "Schedule"]


class Schedule(NamedTuple):
    """A checked schedule.

    Chunks count from 1: ``c`` is a forward of chunk ``c``, ``-c`` its backward, ``-c - 0.5`` the weight gradients that
    its latest backward left. The n-th forward, backward and weight gradients of a chunk are those of microbatch n.

    Attributes:
        order: the entries.
        layers: of each chunk, how many callables it has.
        microbatches: how often each chunk runs.
    """

    order: tuple[float, ...]
    layers: tuple[int, ...]
    microbatches: int

    @classmethod
    def of(
        cls, order: Sequence[float], callables: int, samples: int, layers: Sequence[int] | None, delay_wgrad: bool
    ) -> Schedule:
        """The schedule ``order`` of so many callables and sample arguments.

        ``layers`` are the callables of each chunk; None divides them evenly.

        Raises:
            TypeError: an entry is no number, or ``layers`` is no sequence of integers.
            ValueError: the entries are no schedule, or the numbers of callables or samples do not fit; the message
                names what was expected and what was found.
        """
        order = _entries(order)
        forwards, backwards, wgrads = _counts(order)
        chunks = max(forwards, default=0)
        microbatches = forwards[1]
        expected = {c: microbatches for c in range(1, chunks + 1)}
        if not order:
            raise ValueError("order: expected a forward and a backward of each chunk and microbatch, got no entry")
        if not expected or forwards != expected or backwards != expected:
            raise ValueError(
                f"order: expected as many forwards as backwards of each of chunks 1 to {chunks}, and as many of each "
                f"chunk; got forwards {dict(sorted(forwards.items()))} and backwards {dict(sorted(backwards.items()))}"
            )
        if wgrads != (expected if delay_wgrad else {}):
            wanted = f"{microbatches} entries -c - 0.5 of each chunk c" if delay_wgrad else "none"
            found = dict(sorted(wgrads.items()))
            raise ValueError(f"order: expected {wanted} with delay_wgrad={delay_wgrad}, got, by chunk, {found}")
        _check_sequence(order)
        if layers is None:
            if callables % chunks:
                raise ValueError(f"callables: expected a multiple of {chunks}, the order's chunks, got {callables}")
            layers = [callables // chunks] * chunks
        if not isinstance(layers, Sequence) or not all(isinstance(n, Integral) for n in layers):
            raise TypeError(f"num_layers_per_chunk: expected a number for each chunk, got {layers!r}")
        if len(layers) != chunks or sum(layers) != callables or min(layers) < 1:
            raise ValueError(
                f"num_layers_per_chunk: expected {chunks} positive numbers, one for each chunk of the order, that sum "
                f"to {callables}, the number of callables; got {list(layers)}"
            )
        if samples != callables * microbatches:
            raise ValueError(
                f"sample_args: expected {callables * microbatches}, one for each of {callables} callables and "
                f"{microbatches} microbatches, got {samples}"
            )
        return cls(order, tuple(layers), microbatches)

    def callables(self) -> list[int]:
        """Of each forward that is captured, its callable: for each chunk, its microbatches, and of each its layers.

        Sample arguments and graphed callables stand in this order, and the parameters among a backward graph's inputs.
        """
        found = []
        start = 0
        for layers in self.layers:
            found += list(range(start, start + layers)) * self.microbatches
            start += layers
        return found

    def replays(self, differentiable: Sequence[bool], waits: Sequence[bool]) -> list[tuple[str, int]]:
        """The order in which graphs run: "forward", "backward" or "weight gradients", and of which place.

        Args:
            differentiable: of each callable, whether it has a backward.
            waits: whether that leaves weight gradients.

        Returns:
            Kinds with places in :meth:`callables`.
        """
        ran: Counter[float] = Counter()
        found = []
        for entry in self.order:
            chunk, microbatch = _chunk(entry) - 1, ran[entry]
            ran[entry] += 1
            first, layers = sum(self.layers[:chunk]), self.layers[chunk]
            of_chunk = [(first + i, first * self.microbatches + microbatch * layers + i) for i in range(layers)]
            if entry > 0:
                found += [("forward", place) for _, place in of_chunk]
            else:
                kind, has = ("backward", differentiable) if entry == int(entry) else ("weight gradients", waits)
                found += [(kind, place) for layer, place in reversed(of_chunk) if has[layer]]
        return found

    def by_layer(self, waits: Sequence[bool]) -> Schedule:
        """The same schedule with each layer a chunk of its own: what one chunk's entry runs is several entries.

        ``waits`` says of each layer whether its backward leaves weight gradients; those of others have no entry.
        """
        first = [sum(self.layers[:c]) for c in range(len(self.layers))]
        order: list[float] = []
        for entry in self.order:
            chunk = _chunk(entry) - 1
            of_chunk = range(first[chunk] + 1, first[chunk] + self.layers[chunk] + 1)
            if entry > 0:
                order += of_chunk
            elif entry == int(entry):
                order += [-layer for layer in reversed(of_chunk)]
            else:
                order += [-layer - 0.5 for layer in reversed(of_chunk) if waits[layer - 1]]
        return Schedule(tuple(order), (1,) * sum(self.layers), self.microbatches)

    def places_by_layer(self) -> list[int]:
        """Of each forward of :meth:`by_layer`, in its order, the place that it has in this schedule's."""
        of_callables = self.callables()
        return sorted(range(len(of_callables)), key=lambda i: (of_callables[i], i))


class Replays:
    """Tells whether graphs that share memory are replayed in an order in which nothing is overwritten that is needed.

    A later graph may have the memory of what an earlier one has no more use for: to leave graphs out does no harm, to
    go back begins anew, and what was under way is lost.

    Args:
        events: the order of the capture: "forward", "backward" or "weight gradients", and of which graph.
    """

    def __init__(self, events: Sequence[tuple[str, int]]) -> None:
        self._at = {event: i for i, event in enumerate(events)}
        self._next = self._pass = 0

    def forward(self, graph: int) -> int:
        """The forward of ``graph`` is replayed now; the number of the pass that it is in."""
        at = self._at["forward", graph]
        if at < self._next:
            self._pass += 1
        self._next = at + 1
        return self._pass

    def backward(self, graph: int, number: int) -> None:
        """Its backward is, of the forward of pass ``number``.

        Raises:
            RuntimeError: what it reads has been overwritten.
        """
        self._go_on("backward", graph, number)

    def wgrad(self, graph: int, number: int) -> None:
        """Its weight gradients are.

        Raises:
            RuntimeError: what they read has been overwritten.
        """
        self._go_on("weight gradients", graph, number)

    def _go_on(self, kind: str, graph: int, number: int) -> None:
        at = self._at.get((kind, graph), -1)
        if number != self._pass or at < self._next:
            raise RuntimeError(
                f"CUDA graphs: the {kind} of sample {graph} replayed out of the order of the capture, or twice: graphs "
                f"that were replayed since may have overwritten what it reads; replay in the order of the schedule, or "
                f"all forwards and then all backwards in reverse"
            )
        self._next = at + 1


def _chunk(entry: float) -> int:
    return int(abs(entry))


def _entries(order: Any) -> tuple[float, ...]:
    """``order``, whole numbers as int."""
    if not isinstance(order, Sequence) or isinstance(order, str):
        raise TypeError(f"order: expected a list of numbers, got {order!r}")
    for place, entry in enumerate(order):
        if isinstance(entry, bool) or not isinstance(entry, Real):
            raise TypeError(f"order[{place}]: expected c, -c or -c - 0.5 for a chunk c, got {entry!r}")
        half = entry < 0 and entry % 1 == 0.5
        if not abs(entry) >= 1 or entry % 1 not in (0, 0.5) or (entry % 1 and not half):
            raise ValueError(f"order[{place}]: expected c, -c or -c - 0.5 for a chunk c of 1 and more, got {entry!r}")
    return tuple(float(entry) if entry % 1 else int(entry) for entry in order)


def _counts(order: Sequence[float]) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """By chunk, how many forwards, backwards and weight gradients ``order`` has."""
    forwards, backwards, wgrads = Counter(), Counter(), Counter()
    for entry in order:
        (wgrads if entry % 1 else forwards if entry > 0 else backwards)[_chunk(entry)] += 1
    return forwards, backwards, wgrads


def _check_sequence(order: Sequence[float]) -> None:
    """Each backward follows its forward, and the weight gradients of a backward come before the chunk's next one."""
    forwards, backwards, wgrads = Counter(), Counter(), Counter()
    delays = any(entry != int(entry) for entry in order)
    for place, entry in enumerate(order):
        chunk = _chunk(entry)
        if entry > 0:
            forwards[chunk] += 1
        elif entry != int(entry):
            if wgrads[chunk] == backwards[chunk]:
                raise ValueError(
                    f"order[{place}] = {entry}: no backward of chunk {chunk} has weight gradients left at this place"
                )
            wgrads[chunk] += 1
        else:
            if backwards[chunk] == forwards[chunk]:
                raise ValueError(f"order[{place}] = {entry}: no forward of chunk {chunk} is left at this place")
            if delays and wgrads[chunk] != backwards[chunk]:
                raise ValueError(
                    f"order[{place}] = {entry}: the weight gradients of the chunk's backward before, "
                    f"{-chunk - 0.5}, must come first: Transformer Engine captures those of the latest backward"
                )
            backwards[chunk] += 1
