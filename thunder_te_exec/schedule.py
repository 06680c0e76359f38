"""A pipeline's schedule: in which order forwards, backwards and delayed weight gradients of model chunks run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Schedule"]


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
            TypeError: an entry is no number.
            ValueError: the entries are no schedule, or the numbers of callables or samples do not fit; the message
                names what was expected and what was found.
        """
        forwards, backwards, wgrads = _counts(order)
        chunks = max(forwards, default=0)
        microbatches = forwards[1]
        expected = {c: microbatches for c in range(1, chunks + 1)}
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
        return cls(tuple(order), tuple(layers), microbatches)

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


def _chunk(entry: float) -> int:
    return int(abs(entry))


def _counts(order: Sequence[Any]) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """By chunk, how many forwards, backwards and weight gradients ``order`` has."""
    forwards, backwards, wgrads = Counter(), Counter(), Counter()
    for place, entry in enumerate(order):
        if isinstance(entry, bool) or not isinstance(entry, int | float):
            raise TypeError(f"order[{place}]: expected c, -c or -c - 0.5 for a chunk c, got {entry!r}")
        if not math.isfinite(entry):
            raise ValueError(f"order[{place}]: expected c, -c or -c - 0.5 for a chunk c, got {entry!r}")
        half = entry != int(entry)
        if abs(entry) < 1 or (half and not (entry < 0 and entry % 1 == 0.5)):
            raise ValueError(f"order[{place}]: expected c, -c or -c - 0.5 for a chunk c of 1 and more, got {entry!r}")
        (wgrads if half else forwards if entry > 0 else backwards)[_chunk(entry)] += 1
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
