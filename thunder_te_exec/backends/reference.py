"""Plain torch on any device: the same recipes and state, held bit for bit to what Transformer Engine quantizes.

It is the default on the CPU and the oracle in tests. Formulas are those of Transformer Engine 2.20:
``transformer_engine/common/recipe/recipe_common.cuh`` (scale from amax), ``.../recipe/delayed_scaling.cu`` (update).
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_te_exec.backends.base import Backend, Gemm, Operand, Quantize
from thunder_te_exec.recipe import DelayedScaling, TensorRole, fp8_dtype
from thunder_te_exec.state import AmaxGroup, AmaxSlot

__all__ = ["ReferenceBackend", "amax_of", "quantize", "scale_from_amax"]

_FLOAT32_MAX = torch.finfo(torch.float32).max


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in ``x``, float32 (1,). NaN is left out, as CUDA's ``fmaxf`` does in TE's kernels."""
    return x.detach().abs().float().nan_to_num_(nan=0.0, posinf=float("inf")).amax().reshape(1)


def _divide(numerator: float, x: torch.Tensor) -> torch.Tensor:
    # `number / tensor` is `tensor.reciprocal() * number` in torch: rounded twice.
    return torch.full_like(x, numerator) / x


def scale_from_amax(
    amax: torch.Tensor, fp8_max: float, *, power_2_scale: bool = False, amax_epsilon: float = 0.0
) -> torch.Tensor:
    """``fp8_max / amax``, float32 (1,): 1 where amax is 0 or not finite, float32's maximum where it overflows."""
    amax = amax.clamp(min=amax_epsilon)
    scale = _divide(fp8_max, amax).clamp(max=_FLOAT32_MAX)
    if power_2_scale:
        # Keep sign and exponent of the float32: rounds down to a power of two.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), scale, torch.ones_like(scale))


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x * scale`` in float32, saturated and rounded to nearest even in ``dtype``, as uint8 of the same shape."""
    fp8_max = torch.finfo(dtype).max
    return (x.float() * scale).clamp_(-fp8_max, fp8_max).to(dtype).view(torch.uint8)


class ReferenceBackend(Backend):
    """Quantizers and GEMMs in plain torch."""

    name = "reference"

    def why_not(self, device: torch.device) -> str:
        return ""

    def quantizer(
        self,
        recipe: Any,
        role: TensorRole,
        slot: AmaxSlot | None,
        device: torch.device,
        *,
        rowwise: bool,
        columnwise: bool,
    ) -> Quantize:
        dtype = fp8_dtype(recipe, role)
        fp8_max = torch.finfo(dtype).max
        params = getattr(recipe, role.value, None)

        def delayed(x: torch.Tensor) -> Operand:
            torch.maximum(slot.amax, amax_of(x), out=slot.amax)
            return in_directions(x, slot.scale)

        def current(x: torch.Tensor) -> Operand:
            scale = scale_from_amax(
                amax_of(x), fp8_max, power_2_scale=params.power_2_scale, amax_epsilon=params.amax_epsilon
            )
            return in_directions(x, scale)

        def in_directions(x: torch.Tensor, scale: torch.Tensor) -> Operand:
            data = quantize(x, scale, dtype)
            return Operand(data if rowwise else None, data.t().contiguous() if columnwise else None, 1.0 / scale)

        return current if slot is None else delayed

    def gemm(
        self, a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype, *, use_split_accumulator: bool
    ) -> Gemm:
        def gemm(a, a_scale_inv, b, b_scale_inv, bias):
            # The product of two FP8 numbers is exact in float32, so scales can be applied to the sum, as cuBLAS does.
            out = a.view(a_dtype).float() @ b.view(b_dtype).float().t()
            out *= a_scale_inv * b_scale_inv
            if bias is not None:
                out += bias.float()
            return out.to(out_dtype)

        return gemm

    def update_scales(self, group: AmaxGroup, recipe: Any) -> None:
        update_scales_unfused(group, recipe)


def update_scales_unfused(group: AmaxGroup, recipe: DelayedScaling) -> None:
    """Delayed scaling's update in torch operations, for every recipe, with functions of the user's too."""
    history, scale = group.history, group.scale
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history).clone()  # it may be a view of what is cleared next
    elif recipe.amax_compute_algo == "max":
        amax = history.amax(dim=0)
    else:
        amax = history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0].zero_()
    fp8_max = torch.finfo(group.dtype).max
    if recipe.scaling_factor_compute_algo is not None:
        scale.copy_(recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe))
        return
    new = (_divide(fp8_max, amax) / 2.0**recipe.margin).clamp(max=_FLOAT32_MAX)
    scale.copy_(torch.where(amax.isfinite() & (amax > 0), new, scale))
