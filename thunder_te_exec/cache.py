"""Compiled entries of a function, by the FP8 context that each was compiled for.

thunder looks for a compiled entry by what the function was called with; it knows nothing of FP8 contexts. Which
linears are claimed, what is saved and how it is quantized depend on the recipe, so an entry may serve only under the
one that it was compiled for. This list takes the place of thunder's own, and offers it no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_te_exec.autocast import Fp8Context, active_context
from thunder_te_exec.settings import Settings

__all__ = ["Compiled", "EntriesByContext"]


@dataclass
class Compiled:
    """What is known of an entry beside what thunder keeps.

    Attributes:
        traces: the entry's list of computation traces, which stands for it while it is compiled.
        settings: by device, what it was compiled for; empty from before the first linear was met.
        claims: the decisions about its linears, of ``Fp8State.claims``.
        plan: what its linears are bound by (``thunder_te_exec.binding.Plan``); None where it has none.
    """

    traces: Any = None
    settings: dict[torch.device, Settings] = field(default_factory=dict)
    claims: dict[Any, Any] = field(default_factory=dict)
    plan: Any = None

    def holds_under(self, context: Fp8Context | None, option: Any) -> bool:
        return all(s.hold_under(context, option, device) for device, s in self.settings.items())


class EntriesByContext(list):
    """``CompileStats.interpreter_cache`` of a function with linears; thunder walks it from the newest entry back.

    Args:
        entries: those that there are.
        option: ``te_fp8_recipe`` of the function.
        others: entries of other functions that are offered when none of these fits, and told of new ones
            (``thunder_te_exec.jit_blocks``).
    """

    def __init__(self, entries: list[Any], option: Any, others: Any = None) -> None:
        super().__init__(entries)
        self._option, self._others = option, others
        # Entries from before the first linear was met do not depend on the context.
        self._compiled = [Compiled() for _ in entries]
        self._compiling = Compiled()

    @classmethod
    def of(cls, compile_data: Any, compile_stats: Any) -> EntriesByContext:
        """The list of the function that is being compiled, put in the place of thunder's on first use."""
        entries = compile_stats.interpreter_cache
        if not isinstance(entries, cls):
            entries = cls(entries, compile_data.compile_options.get("te_fp8_recipe"))
            compile_stats.interpreter_cache = entries
        return entries

    def depends_on(self, traces: Any, device: torch.device, settings: Settings) -> None:
        """Note that the entry being compiled, which has the list of computation ``traces``, depends on ``settings``."""
        self._entry_of(traces).settings[device] = settings

    def decided(self, traces: Any, key: Any, claim: Any) -> None:
        """Note a decision, with its key in ``Fp8State.claims``, about a linear of that entry."""
        self._entry_of(traces).claims[key] = claim

    def planned(self, traces: Any, plan: Any) -> None:
        """Note what the linears of that entry are bound by."""
        self._entry_of(traces).plan = plan

    def _entry_of(self, traces: Any) -> Compiled:
        if self._compiling.traces is not traces:
            self._compiling = Compiled(traces)
        return self._compiling

    def append(self, entry: Any) -> None:
        compiled = self._entry_of(entry.computation_traces)
        self._compiling = Compiled()
        self.add(entry, compiled)
        if self._others is not None:
            self._others.add(entry, compiled)

    def add(self, entry: Any, compiled: Compiled) -> None:
        """Append an entry that was not compiled for this function."""
        super().append(entry)
        self._compiled.append(compiled)

    def __reversed__(self) -> Iterator[Any]:
        context = active_context()
        for entry, compiled in zip(list(super().__reversed__()), self._compiled[::-1]):
            if compiled.holds_under(context, self._option):
                yield entry
        if self._others is not None:
            yield from self._others.offered(lambda compiled: compiled.holds_under(context, self._option))
