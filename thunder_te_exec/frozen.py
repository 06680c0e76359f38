"""Frozen weights in FP8 alone: ``quantize_frozen_`` and ``dequantize_``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thunder_te_exec import compat  # noqa: F401  (before thunder)

from thunder.core.module import ThunderModule

from thunder_te_exec.autocast import default_recipe
from thunder_te_exec.claim import why_not_sizes, why_not_worth
from thunder_te_exec.fp8_weight import Fp8Weight, dequantize_pair, weight_format
from thunder_te_exec.layouts import is_transposable
from thunder_te_exec.recipe import TensorRole, check_supported

__all__ = ["FrozenWeight", "dequantize_", "quantize_frozen_"]

_FORMS = ("high_precision", "fp8")


@dataclass(frozen=True)
class FrozenWeight:
    """What ``quantize_frozen_`` did with the weight of one linear.

    Attributes:
        weight: fully qualified name.
        weight_shape: (out_features, in_features).
        quantized: whether it is held in FP8 now.
        reason: why it is not; "" for a quantized one.
    """

    weight: str
    weight_shape: tuple[int, ...]
    quantized: bool
    reason: str


def quantize_frozen_(
    model: nn.Module,
    recipe: Any = None,
    *,
    te_filter: Callable[[str, tuple[int, ...]], bool] | None = None,
    keep_transposed: bool = False,
    state_dict: str = "high_precision",
) -> tuple[FrozenWeight, ...]:
    """Hold the frozen weights of the ``nn.Linear`` of ``model`` in FP8 alone, in place, one weight after the other.

    A weight takes one byte an element instead of two or four. Its numbers are from then on those that FP8 has. In a
    function of ``thunder.jit(executors=[te_ex])`` a linear reads them as they are; elsewhere they are converted each
    time. ``load_state_dict`` quantizes what it loads, weight by weight; on the ``meta`` device nothing is allocated, so
    that ``to_empty`` and loading in parts bring in a model that was never there in high precision as a whole.

    Args:
        recipe: whose format weights get, the one that the model will run under; the default of the weights' device
            where not given, so that it must be given on the ``meta`` device.
            For DelayedScaling the scale is the one that a frozen weight has for good, from its amax.
        te_filter: as the option of ``thunder.jit``: chooses linears by the name and shape of their weight.
        keep_transposed: keep the transposed copy, one more byte an element, that the gradient of a linear's input
            needs; otherwise backward makes it each time.
        state_dict: what ``state_dict()`` of the model gives for ``weight``: "high_precision" numbers of its type; or
            "fp8", ``weight`` in torch's FP8 type and ``weight_scale_inv``, float32, which it is multiplied with.
            Both can be loaded.

    Returns:
        For every linear, whether its weight is held in FP8, and if not, why.

    Raises:
        NotImplementedError: ``recipe`` is not supported, or scales rows and columns of a weight each by itself.
        RuntimeError: nothing can quantize on a weight's device; what came before stays quantized.
        TypeError: ``model`` came from ``thunder.jit``: functions follow when the model that they were made of changes;
            or it is no module.
        ValueError: ``state_dict`` is another word, or no recipe is given for a weight on ``meta``.
    """
    if state_dict not in _FORMS:
        raise ValueError(f"quantize_frozen_(state_dict={state_dict!r}): expected one of {', '.join(map(repr, _FORMS))}")
    others = {  # by weight, what reads it and is no linear
        id(parameter): module_name
        for module_name, module in _unjitted(model, "quantize_frozen_").named_modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }
    linears: dict[int, dict[str, nn.Linear]] = {}  # by weight, which several may have in common
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            linears.setdefault(id(module.weight), {})[f"{module_name}.weight".lstrip(".")] = module
    report = []
    for key, modules in linears.items():
        name, module = next(iter(modules.items()))
        weight = module.weight
        if recipe is None and weight.is_meta:
            raise ValueError(f"quantize_frozen_: {name} is on the meta device, which has no default recipe: give one")
        chosen = recipe if recipe is not None else default_recipe(weight.device)
        _check(chosen)
        reasons = (_why_not(n, m, chosen, te_filter, others.get(key)) for n, m in modules.items())
        reason = next(filter(None, reasons), "")
        if not reason:
            saves_fp8 = state_dict == "fp8"
            if isinstance(weight, Fp8Weight):
                weight.keep_transposed_(keep_transposed)
                weight.saves_fp8 = saves_fp8
            else:
                fp8 = Fp8Weight.quantized(weight, chosen, name, keep_transposed=keep_transposed, saves_fp8=saves_fp8)
                _become(weight, name, fp8)
        report += (FrozenWeight(n, tuple(weight.shape), not reason, reason) for n in modules)
    _add_hooks(model)
    return tuple(report)


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Undo ``quantize_frozen_``: make every weight that is held in FP8 an ordinary frozen parameter, in place.

    Its numbers stay those that FP8 has.

    Args:
        dtype: of the weights; the type that they had where not given.
    """
    for name, parameter in _unjitted(model, "dequantize_").named_parameters():
        if isinstance(parameter, Fp8Weight):
            _become(parameter, name, parameter.dequantize(dtype))
    return model


def _unjitted(model: nn.Module, function: str) -> nn.Module:
    if isinstance(model, ThunderModule):
        raise TypeError(f"{function}: got what thunder.jit made of a model; give the model itself, before or after")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: expected a torch.nn.Module first, got {type(model).__name__}")
    return model


def _become(parameter: nn.Parameter, name: str, weight: torch.Tensor) -> None:
    """Make ``parameter`` hold ``weight``, for all that refer to it: linears, optimizers, functions of thunder.jit."""
    new = nn.Parameter(weight, requires_grad=parameter.requires_grad)
    users = {key: value for key, value in vars(parameter).items() if key not in Fp8Weight.OWN_ATTRIBUTES}
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as e:
        raise RuntimeError(
            f"{name}: cannot be exchanged for its other form while something refers to it, such as a graph that waits "
            f"for its backward, or what thunderfx or torch.export made: change it before that ({e})"
        ) from e
    vars(parameter).update(users)


def _check(recipe: Any) -> None:
    check_supported(recipe)
    if not is_transposable(recipe, TensorRole.WEIGHT):
        raise NotImplementedError(
            f"quantize_frozen_: {type(recipe).__name__} scales rows and columns of a weight each by itself, so that "
            f"what the gradient of the input needs cannot be made of what the output needs; use DelayedScaling, "
            f"Float8CurrentScaling or Float8BlockScaling with square blocks"
        )


def _why_not(
    name: str,
    linear: nn.Linear,
    recipe: Any,
    te_filter: Callable[[str, tuple[int, ...]], bool] | None,
    other: str | None,
) -> str:
    weight = linear.weight
    if linear._parameters.get("weight") is not weight:
        return "computed from other parameters (parametrized or pruned)"
    if isinstance(weight, Fp8Weight):
        found = type(weight.recipe).__name__
        return "" if weight.format == weight_format(recipe) else f"held in FP8 already, as {found} has it"
    if weight.requires_grad:
        return "trained"
    if other is not None:
        return f"read by {other or 'the model itself'!r} too, which is no linear"
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{weight.dtype}: expected float32, bfloat16 or float16"
    out_features, in_features = weight.shape
    why_not = why_not_sizes({"out_features": out_features, "in_features": in_features}, recipe)
    return why_not or why_not_worth((out_features, in_features), name, te_filter) or ""


def _add_hooks(model: nn.Module) -> None:
    """Let the state_dict of ``model``, and of each of its linears, give and take other forms of FP8 weights."""
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear)
        if (is_linear or module is model) and _on_save not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_on_save)
            if is_linear:
                module.register_load_state_dict_pre_hook(_on_load)


def _on_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    own = f"{prefix}weight"
    entries = [(own, state_dict.get(own))] if isinstance(module, nn.Linear) else list(state_dict.items())
    for key, weight in entries:
        if isinstance(weight, Fp8Weight) and key.startswith(prefix):
            if weight.saves_fp8:
                state_dict[key], state_dict[f"{key}_scale_inv"] = weight.pair()
            else:
                state_dict[key] = weight.dequantize()


def _on_load(
    linear: nn.Linear,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put one tensor that ``linear.weight`` can copy in the place of a pair, or that can take its place."""
    key = f"{prefix}weight"
    weight, found = linear.weight, state_dict.get(key)
    if not isinstance(found, torch.Tensor):
        return
    scale_inv = state_dict.pop(f"{key}_scale_inv", None)
    try:
        if found.element_size() == 1 and scale_inv is None:
            raise ValueError(f"{found.dtype}, and {key}_scale_inv is missing: load the pair in one call")
        if not isinstance(weight, Fp8Weight):
            state_dict[key] = found if scale_inv is None else dequantize_pair(found, scale_inv).to(weight.dtype)
        elif scale_inv is not None:
            state_dict[key] = weight.of_pair(found, scale_inv)
        elif local_metadata.get("assign_to_params_buffers"):
            state_dict[key] = weight.requantized(found)
    except (ValueError, RuntimeError) as e:
        error_msgs.append(f"{key}: {e}")
        state_dict[key] = weight.detach()  # and not missing beside that
