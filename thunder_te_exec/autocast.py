"""Which recipe is active: ``te.autocast``, ``thunder_te_exec.autocast``, and what holds outside of both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.recipe import DelayedScaling

__all__ = ["Fp8Context", "active_context", "autocast", "default_recipe", "entered"]


@dataclass(frozen=True)
class Fp8Context:
    """An FP8 context as a linear sees it.

    Attributes:
        enabled: False inside ``autocast(enabled=False)``.
        recipe: the recipe given to the context; None where none was given.
        amax_reduction_group: process group over which amaxes are reduced; None is the default group.
    """

    enabled: bool
    recipe: Any = None
    amax_reduction_group: Any = None


# What holds whatever Transformer Engine, which keeps this state itself, says: what `autocast` entered where it is not
# there, and what `entered` did. A tuple of one, for outside of any context is a context too.
_entered: ContextVar[tuple[Fp8Context | None] | None] = ContextVar("thunder_te_exec_autocast", default=None)


@contextmanager
def autocast(*, enabled: bool = True, recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
    """Run jitted functions in FP8 under ``recipe``, or not in FP8; means what ``te.autocast`` means.

    Where Transformer Engine can be used this enters ``te.autocast``, so the two nest in any order; elsewhere it works
    by itself, in the thread that enters it. A jitted function is compiled for each recipe that it is called under.

    Args:
        enabled: False runs in high precision what is compiled inside.
        recipe: a recipe of :mod:`thunder_te_exec.recipe`; None is the device's default.
        amax_reduction_group: process group over which delayed scaling reduces amaxes; None is the default group.

    Raises:
        RuntimeError: entered inside a function that thunder is compiling, where it could have no effect.
        TypeError: ``enabled`` is no boolean.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"autocast(enabled={enabled!r}): expected True or False")
    if compat.is_tracing():
        raise RuntimeError(
            "autocast inside a jitted function has no effect on it: enter it around the call, or choose with te_filter "
            "which linears run in FP8"
        )
    if compat.te_import_error() is None and torch.cuda.is_available():
        import transformer_engine.pytorch as te

        with te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=amax_reduction_group):
            yield
        return
    with entered(Fp8Context(enabled, recipe, amax_reduction_group)):
        yield


@contextmanager
def entered(context: Fp8Context | None) -> Iterator[None]:
    """Inside, ``context`` is the active one, whatever context of Transformer Engine's encloses this."""
    token = _entered.set((context,))
    try:
        yield
    finally:
        _entered.reset(token)


def active_context() -> Fp8Context | None:
    """The innermost FP8 context, or None outside any."""
    found = _entered.get()
    if found is not None:
        return found[0]
    state = compat.te_autocast_state()
    if state is None:
        return None
    depth, enabled, recipe, group = state
    return Fp8Context(enabled, recipe, group) if depth > 0 else None


def default_recipe(device: torch.device) -> Any:
    """What runs on ``device`` where nobody chose a recipe: Transformer Engine's default there, else delayed scaling."""
    if device.type == "cuda" and compat.te_import_error() is None:
        return compat.te_default_recipe()
    return DelayedScaling()
