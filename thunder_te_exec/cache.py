"""Compiled entries of a function, by the FP8 context that each was compiled for.

thunder looks for a compiled entry by what the function was called with; it knows nothing of FP8 contexts. Which
linears are claimed, what is saved and how it is quantized depend on the recipe, so an entry may serve only under the
one that it was compiled for. This list takes the place of thunder's own, and offers it no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from thunder_te_exec.autocast import active_context
from thunder_te_exec.settings import Settings

__all__ = ["EntriesByContext"]


class EntriesByContext(list):
    """``CompileStats.interpreter_cache`` of a function with linears; thunder walks it from the newest entry back."""

    def __init__(self, entries: list[Any], option: Any) -> None:
        super().__init__(entries)
        self._option = option
        # Entries from before the first linear was met do not depend on the context.
        self._settings: list[dict[torch.device, Settings]] = [{} for _ in entries]
        self._compiling: tuple[Any, dict[torch.device, Settings]] = (None, {})

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
        if self._compiling[0] is not traces:
            self._compiling = (traces, {})
        self._compiling[1][device] = settings

    def append(self, entry: Any) -> None:
        traces, settings = self._compiling
        super().append(entry)
        self._settings.append(settings if traces is entry.computation_traces else {})
        self._compiling = (None, {})

    def __reversed__(self) -> Iterator[Any]:
        context = active_context()
        for entry, settings in zip(list(super().__reversed__()), reversed(self._settings)):
            if all(s.hold_under(context, self._option, device) for device, s in settings.items()):
                yield entry
