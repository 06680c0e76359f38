"""FP8 recipes: Transformer Engine's classes where it is installed, else classes of the same names and fields.

``from thunder_te_exec.recipe import DelayedScaling`` therefore gives the class that ``te.autocast`` takes, and a
script written on a machine without a GPU runs unchanged on one.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from thunder_te_exec import compat, recipe_classes

__all__ = [
    "DelayedScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "Product",
    "QParams",
    "Recipe",
    "TensorRole",
    "check_supported",
    "describe",
    "fp8_dtype",
    "same_recipe",
    "use_split_accumulator",
]


_classes: Any = compat.te_recipes() or recipe_classes
Format = _classes.Format
MMParams = _classes.MMParams
QParams = _classes.QParams
Recipe = _classes.Recipe
DelayedScaling = _classes.DelayedScaling
Float8CurrentScaling = _classes.Float8CurrentScaling


class TensorRole(Enum):
    """What a quantized tensor is to its linear; the value names the recipe's field with its quantization options."""

    INPUT = "fp8_quant_fwd_inp"
    WEIGHT = "fp8_quant_fwd_weight"
    GRAD_OUTPUT = "fp8_quant_bwd_grad"

    @property
    def forward(self) -> bool:
        return self is not TensorRole.GRAD_OUTPUT


def fp8_dtype(recipe: Any, role: TensorRole) -> torch.dtype:
    """``torch.float8_e4m3fn`` or ``torch.float8_e5m2``: what tensors of ``role`` are quantized to under ``recipe``."""
    e5m2 = recipe.fp8_format == Format.HYBRID and not role.forward
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


class Product(Enum):
    """The three products of a linear.

    The value is the recipe's field with its options and what Transformer Engine uses for a recipe without that field
    (``_2X_ACC_*`` of ``transformer_engine.pytorch.module.base``).
    """

    FPROP = ("fp8_gemm_fprop", False)
    DGRAD = ("fp8_gemm_dgrad", True)
    WGRAD = ("fp8_gemm_wgrad", True)


def use_split_accumulator(recipe: Any, product: Product) -> bool:
    """Whether ``product`` accumulates in full float32 under ``recipe``."""
    name, default = product.value
    params = getattr(recipe, name, None)
    return default if params is None else params.use_split_accumulator


def check_supported(recipe: Any) -> None:
    """Raise unless every field of ``recipe`` is honoured here.

    Raises:
        TypeError: not a recipe.
        ValueError: a value that a field cannot have; the message names it.
        NotImplementedError: a recipe, or what a field asks for, is not supported; the message names it.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"FP8 recipe: expected an instance, such as DelayedScaling(), of a class of thunder_te_exec.recipe; "
            f"got {recipe!r} of type {type(recipe).__name__}"
        )
    name = type(recipe).__name__
    if not isinstance(recipe, (DelayedScaling, Float8CurrentScaling)):
        raise NotImplementedError(
            f"recipe {name} is not supported by thunder_te_exec; use DelayedScaling or Float8CurrentScaling"
        )
    for flag in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, flag, False):
            raise NotImplementedError(f"{name}.{flag}=True: attention is not run in FP8 by thunder_te_exec")
    if getattr(recipe, "backward_override", None) is not None:
        raise NotImplementedError(f"{name}.backward_override={recipe.backward_override!r} is not supported")
    if recipe.fp8_format not in (Format.E4M3, Format.HYBRID):
        raise ValueError(f"{name}.fp8_format={recipe.fp8_format!r}: expected Format.E4M3 or Format.HYBRID")
    if isinstance(recipe, DelayedScaling):
        _check_delayed(recipe)
    else:
        _check_current(recipe)


_LARGEST_MARGIN = 64  # float32 scales have exponents to 127


def _check_delayed(recipe: Any) -> None:
    if type(recipe.amax_history_len) is not int or recipe.amax_history_len < 1:
        raise ValueError(
            f"DelayedScaling.amax_history_len={recipe.amax_history_len!r}: expected an integer of at least 1"
        )
    if type(recipe.margin) is not int or not -_LARGEST_MARGIN <= recipe.margin <= _LARGEST_MARGIN:
        raise ValueError(f"DelayedScaling.margin={recipe.margin!r}: expected an integer from -64 to 64")
    if type(recipe.reduce_amax) is not bool:
        raise ValueError(f"DelayedScaling.reduce_amax={recipe.reduce_amax!r}: expected True or False")
    algo = recipe.amax_compute_algo
    if algo not in ("max", "most_recent") and not callable(algo):
        raise ValueError(f"DelayedScaling.amax_compute_algo={algo!r}: expected 'max', 'most_recent' or a function")
    factor = recipe.scaling_factor_compute_algo
    if factor is not None and not callable(factor):
        raise ValueError(f"DelayedScaling.scaling_factor_compute_algo={factor!r}: expected None or a function")


def _check_current(recipe: Any) -> None:
    # Transformer Engine reads the operands' own options only, and ignores the flag of an instance.
    options = [role.value for role in TensorRole]
    for name, expected in (*((n, QParams) for n in options), *((p.value[0], MMParams) for p in Product)):
        if not isinstance(getattr(recipe, name), expected):
            raise ValueError(
                f"Float8CurrentScaling.{name}={getattr(recipe, name)!r}: expected an instance of {expected.__name__}"
            )
    if recipe.use_power_2_scales and not all(getattr(recipe, name).power_2_scale for name in options):
        raise NotImplementedError(
            "Float8CurrentScaling.use_power_2_scales=True has no effect in Transformer Engine: assign "
            f"QParams(power_2_scale=True) to the recipe's {', '.join(options)}"
        )
    for name in options:
        params = getattr(recipe, name)
        for feature in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
            if getattr(params, feature, False):
                raise NotImplementedError(f"Float8CurrentScaling.{name}.{feature}=True is not supported")


def same_recipe(a: Any, b: Any) -> bool:
    """Whether two recipes ask for the same numbers: the same class, and equal fields."""
    names = _fields(a).keys() | _fields(b).keys()
    return type(a) is type(b) and all(getattr(a, name) == getattr(b, name) for name in names)


def describe(recipe: Any) -> dict[str, str]:
    """The recipe's class, under "recipe", and its fields, as text."""
    fields = {name: getattr(value, "__qualname__", None) or str(value) for name, value in _fields(recipe).items()}
    return {"recipe": type(recipe).__name__, **fields}


def _fields(recipe: Any) -> dict[str, Any]:
    # Transformer Engine caches a repr on the instance; what is not on the instance is equal by its class.
    return {name: value for name, value in vars(recipe).items() if not name.startswith("_")}
