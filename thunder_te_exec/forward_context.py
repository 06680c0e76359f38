"""The module that forward traces import as ``transformer_engine``.

thunder 0.2.6 prints a decorator over a trace that holds FP8 linears, and its text is fixed::

    @transformer_engine.fp8_autocast(fp8_recipe=te_fp8_recipe)

This is the function that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_te_exec.scale_updates import Fp8ForwardContext

__all__ = ["fp8_autocast"]


def fp8_autocast(*, fp8_recipe: Fp8ForwardContext) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator that runs a forward trace in its FP8 context."""
    return fp8_recipe.decorate
