"""FP8 recipes: Transformer Engine's classes where it is installed, else classes of the same names and fields.

``from thunder_te_exec.recipe import DelayedScaling`` therefore gives the class that ``te.autocast`` takes, and a
script written on a machine without a GPU runs unchanged on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from thunder_te_exec import compat, recipe_classes

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Product",
    "QParams",
    "Recipe",
    "TensorRole",
    "check_supported",
    "describe",
    "fp8_dtype",
    "has_functions",
    "quantization_params",
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
Float8BlockScaling = _classes.Float8BlockScaling
MXFP8BlockScaling = _classes.MXFP8BlockScaling
NVFP4BlockScaling = _classes.NVFP4BlockScaling


class TensorRole(Enum):
    """What a quantized tensor is to its linear; the value ends the name of the recipe's quantization options for it."""

    INPUT = "quant_fwd_inp"
    WEIGHT = "quant_fwd_weight"
    GRAD_OUTPUT = "quant_bwd_grad"

    @property
    def forward(self) -> bool:
        return self is not TensorRole.GRAD_OUTPUT


def fp8_dtype(recipe: Any, role: TensorRole) -> torch.dtype:
    """``torch.float8_e4m3fn`` or ``torch.float8_e5m2``: what tensors of ``role`` are quantized to under ``recipe``."""
    e5m2 = recipe.fp8_format == Format.HYBRID and not role.forward
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


def quantization_params(recipe: Any, role: TensorRole) -> Any:
    """The :class:`QParams` of tensors of ``role``: the recipe's, or all defaults where it has none."""
    return getattr(recipe, _params_name(recipe, role), None) or QParams()


def _params_name(recipe: Any, role: TensorRole) -> str:
    return f"{'fp4' if isinstance(recipe, NVFP4BlockScaling) else 'fp8'}_{role.value}"


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
    check = next((f for c, f in _CHECKS.items() if isinstance(recipe, c)), None)
    if check is None:
        known = ", ".join(c.__name__ for c in _CHECKS)
        raise NotImplementedError(f"recipe {name} is not supported by thunder_te_exec; use one of {known}")
    for flag in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, flag, False):
            raise NotImplementedError(f"{name}.{flag}=True: attention is not run in FP8 by thunder_te_exec")
    if getattr(recipe, "backward_override", None) is not None:
        raise NotImplementedError(f"{name}.backward_override={recipe.backward_override!r} is not supported")
    if recipe.fp8_format not in (Format.E4M3, Format.HYBRID):
        raise ValueError(f"{name}.fp8_format={recipe.fp8_format!r}: expected Format.E4M3 or Format.HYBRID")
    check(recipe)


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


def _check_params(recipe: Any, honoured: tuple[str, ...]) -> None:
    """Raise unless the recipe's options of all operands ask for nothing but what is ``honoured``."""
    for role in TensorRole:
        name = f"{type(recipe).__name__}.{_params_name(recipe, role)}"
        params = getattr(recipe, _params_name(recipe, role))
        if not isinstance(params, QParams):
            raise ValueError(f"{name}={params!r}: expected an instance of QParams")
        if not (isinstance(params.amax_epsilon, (int, float)) and 0 <= params.amax_epsilon < math.inf):
            raise ValueError(f"{name}.amax_epsilon={params.amax_epsilon!r}: expected a finite number of at least 0")
        for option in (o for o in vars(QParams()) if not o.startswith("_") and o not in honoured):
            if getattr(params, option) != getattr(QParams(), option):
                raise NotImplementedError(f"{name}.{option}={getattr(params, option)!r} is not supported")


def _check_products(recipe: Any) -> None:
    for name, _ in (product.value for product in Product):
        if not isinstance(getattr(recipe, name), MMParams):
            raise ValueError(
                f"{type(recipe).__name__}.{name}={getattr(recipe, name)!r}: expected an instance of MMParams"
            )


def _check_flag_has_its_effect(recipe: Any, flag: str, *, power_2_scale: bool) -> None:
    # Transformer Engine reads the operands' own options only, and ignores the flag of an instance.
    if getattr(recipe, flag) and any(quantization_params(recipe, r).power_2_scale != power_2_scale for r in TensorRole):
        names = ", ".join(_params_name(recipe, role) for role in TensorRole)
        raise NotImplementedError(
            f"{type(recipe).__name__}.{flag}=True has no effect in Transformer Engine: assign "
            f"QParams(power_2_scale={power_2_scale}) to the recipe's {names}"
        )


def _check_current(recipe: Any) -> None:
    _check_params(recipe, ("power_2_scale", "amax_epsilon"))
    _check_products(recipe)
    _check_flag_has_its_effect(recipe, "use_power_2_scales", power_2_scale=True)


def _check_float8_blocks(recipe: Any) -> None:
    _check_params(recipe, ("power_2_scale", "amax_epsilon"))
    _check_products(recipe)
    _check_flag_has_its_effect(recipe, "use_f32_scales", power_2_scale=False)
    dims = {name: getattr(recipe, f"{name}_block_scaling_dim") for name in ("x", "w", "grad")}
    if any(dim not in (1, 2) for dim in dims.values()) or sum(dim == 2 for dim in dims.values()) > 1:
        raise ValueError(
            f"Float8BlockScaling.x/w/grad_block_scaling_dim={tuple(dims.values())}: expected 1 or 2 each, and 2 for "
            "one of them at most"
        )
    for name, _ in (product.value for product in Product):
        if not getattr(recipe, name).use_split_accumulator:
            raise ValueError(f"Float8BlockScaling.{name}: block scaling needs use_split_accumulator=True")


def _check_mxfp8(recipe: Any) -> None:
    if type(recipe.enable_2d_quantization) is not bool:
        raise ValueError(
            f"MXFP8BlockScaling.enable_2d_quantization={recipe.enable_2d_quantization!r}: expected True or False"
        )
    if recipe.margin != 0:
        raise NotImplementedError(f"MXFP8BlockScaling.margin={recipe.margin!r} has no effect in Transformer Engine")


def _check_nvfp4(recipe: Any) -> None:
    _check_params(recipe, ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"))
    for field, only in (("row_scaled_activation", False), ("nvfp4_4over6", "none"), ("fp4_format", Format.E2M1)):
        if getattr(recipe, field) != only:
            raise NotImplementedError(f"NVFP4BlockScaling.{field}={getattr(recipe, field)!r} is not supported")
    if recipe.fp8_format is not Format.E4M3:
        raise ValueError(f"NVFP4BlockScaling.fp8_format={recipe.fp8_format!r}: expected Format.E4M3")
    for name, option in (
        ("fp4_quant_fwd_weight", "random_hadamard_transform"),
        ("fp4_quant_fwd_weight", "stochastic_rounding"),
        ("fp4_quant_fwd_inp", "stochastic_rounding"),
        ("fp4_quant_fwd_inp", "fp4_2d_quantization"),
        ("fp4_quant_bwd_grad", "fp4_2d_quantization"),
    ):
        if getattr(getattr(recipe, name), option):
            raise NotImplementedError(f"NVFP4BlockScaling.{name}.{option}=True is not supported")
    for flag, name, option in (
        ("disable_rht", "fp4_quant_bwd_grad", "random_hadamard_transform"),
        ("disable_stochastic_rounding", "fp4_quant_bwd_grad", "stochastic_rounding"),
        ("disable_2d_quantization", "fp4_quant_fwd_weight", "fp4_2d_quantization"),
    ):
        if getattr(recipe, flag) and getattr(getattr(recipe, name), option):
            raise NotImplementedError(
                f"NVFP4BlockScaling.{flag}=True has no effect in Transformer Engine once the recipe is made: "
                f"give it to the constructor, or assign QParams to {name}"
            )
    if recipe.fp4_quant_fwd_inp.random_hadamard_transform != recipe.fp4_quant_bwd_grad.random_hadamard_transform:
        raise ValueError(
            "NVFP4BlockScaling: random_hadamard_transform of fp4_quant_fwd_inp and fp4_quant_bwd_grad must be equal: "
            "both operands of wgrad are transformed, or neither"
        )


_CHECKS: dict[type, Callable[[Any], None]] = {
    DelayedScaling: _check_delayed,
    Float8CurrentScaling: _check_current,
    Float8BlockScaling: _check_float8_blocks,
    MXFP8BlockScaling: _check_mxfp8,
    NVFP4BlockScaling: _check_nvfp4,
}


def has_functions(recipe: Any) -> bool:
    """Whether delayed scaling's ``recipe`` computes scales with functions of the user's."""
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


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
