"""What a compilation is asked for: options of ``thunder.jit`` and the active FP8 context, checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.autocast import Fp8Context, active_context, default_recipe
from thunder_te_exec.backends import BACKENDS, Backend, default_backend
from thunder_te_exec.recipe import check_supported, same_recipe
from thunder_te_exec.state import Fp8State

__all__ = ["Settings", "recipe_in_force"]

_OPTIONS = {
    "te_fp8_recipe": "thunder_te_exec: recipe used outside of any autocast context",
    "te_backend": "thunder_te_exec: 'te' or 'reference'; the default is the device's",
    "te_weight_cache": "thunder_te_exec: keep quantized weights while they do not change; default: frozen ones",
    "te_filter": "thunder_te_exec: callable(weight_fqn, weight_shape) -> bool, decides instead of the thin-linear rule",
    "te_recompute_activations": "thunder_te_exec: False saves for backward what is cheap to compute again",
    "te_delay_wgrad": "thunder_te_exec: weight and bias gradients of FP8 linears wait for DelayedWgrad.backward_dw",
    "te_fuse_wgrad_accumulation": "thunder_te_exec: delayed weight gradients are added to main_grad where there is one",
}


@dataclass(frozen=True)
class Settings:
    """What holds for linears on one device in one compilation.

    Attributes:
        enabled: False inside ``autocast(enabled=False)``.
        recipe: a private copy of the recipe in force.
        amax_reduction_group: process group of the FP8 context.
        backend: what runs the linears; None where nothing can, for the reason ``why_no_backend``.
        te_filter: the user's choice of linears, or None.
        weight_cache: whether a weight is quantized again only when it has changed; None for frozen ones alone.
    """

    enabled: bool
    recipe: Any
    amax_reduction_group: Any
    backend: Backend | None
    why_no_backend: str
    te_filter: Callable[[str, tuple[int, ...]], bool] | None
    weight_cache: bool | None

    @classmethod
    def current(cls, compile_data: Any, device: torch.device) -> Settings:
        """Settings of the compilation under way.

        Raises:
            TypeError, ValueError, NotImplementedError: an option is not known, or it or the recipe is not usable; the
                message names it.
        """
        _check_names(compile_data.compile_options)
        te_filter = _option("te_filter")
        if te_filter is not None and not callable(te_filter):
            raise TypeError(f"te_filter: expected a callable(fqn, weight_shape) -> bool, got {te_filter!r}")
        weight_cache = _boolean("te_weight_cache")
        context = active_context()
        recipe = recipe_in_force(context, _option("te_fp8_recipe"), device)
        enabled = context is None or context.enabled
        if enabled:
            check_supported(recipe)
        # A recipe that is not enabled need not run here; the option is checked in any case.
        backend, why = _backend(_option("te_backend"), device, recipe if enabled else default_recipe(device))
        group = context.amax_reduction_group if context is not None else None
        return cls(enabled, copy.copy(recipe), group, backend, why, te_filter, weight_cache)

    @staticmethod
    def recomputes_activations() -> bool:
        """The option ``te_recompute_activations`` of the compilation under way.

        Raises:
            TypeError: it is no boolean.
        """
        return _boolean("te_recompute_activations") is not False

    @staticmethod
    def delays_wgrad() -> bool:
        """The option ``te_delay_wgrad`` of the compilation under way.

        Raises:
            TypeError: it is no boolean.
        """
        return _boolean("te_delay_wgrad") is True

    @staticmethod
    def fuses_wgrad_accumulation() -> bool:
        """The option ``te_fuse_wgrad_accumulation`` of the compilation under way.

        Raises:
            TypeError: it is no boolean.
            ValueError: no weight gradients are delayed.
        """
        fuses = _boolean("te_fuse_wgrad_accumulation") is True
        if fuses and not Settings.delays_wgrad():
            raise ValueError(
                "te_fuse_wgrad_accumulation=True accumulates delayed gradients: give te_delay_wgrad=True too"
            )
        return fuses

    def hold_under(self, context: Fp8Context | None, option: Any, device: torch.device) -> bool:
        """Whether a compilation under ``context`` would have these settings, the options being what they are."""
        enabled = context is None or context.enabled
        if not (enabled and self.enabled):
            return enabled == self.enabled
        group = context.amax_reduction_group if context is not None else None
        return group is self.amax_reduction_group and same_recipe(recipe_in_force(context, option, device), self.recipe)

    @property
    def key(self) -> Any:
        """Tells settings apart under which a linear may be decided on differently."""
        return self.enabled, type(self.recipe), None if self.backend is None else self.backend.name

    def warn_no_backend(self, state: Fp8State) -> None:
        """Say once for each jitted function that nothing can be claimed, and what to do."""
        if self.why_no_backend not in state.warned:
            state.warned.add(self.why_no_backend)
            compat.warn(f"thunder_te_exec claims no linear: {self.why_no_backend}")


def _check_names(compile_options: dict[str, Any]) -> None:
    for name in compile_options:
        if name.startswith("te_") and name not in _OPTIONS:
            raise TypeError(f"thunder.jit(..., {name}=...): no such option; those of te_ex are {', '.join(_OPTIONS)}")


def _option(name: str) -> Any:
    return compat.compile_option(name, _OPTIONS[name])


def _boolean(name: str) -> bool | None:
    value = _option(name)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def recipe_in_force(context: Fp8Context | None, option: Any, device: torch.device) -> Any:
    """Inside a context its recipe, outside of any the ``te_fp8_recipe`` option; the device's default if not given."""
    recipe = option if context is None else context.recipe
    return default_recipe(device) if recipe is None else recipe


def _backend(name: str | None, device: torch.device, recipe: Any) -> tuple[Backend | None, str]:
    if name is None:
        return default_backend(device, recipe)
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"te_backend={name!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    backend = BACKENDS[name]()
    why = backend.why_not(device, recipe)
    if why:
        raise RuntimeError(f"te_backend={name!r} cannot run {type(recipe).__name__} on {device}: {why}")
    return backend, ""
