"""Plain torch on any device: the same recipes and state, held bit for bit to what Transformer Engine quantizes.

It is the default on the CPU and the oracle in tests. Formulas are those of Transformer Engine 2.20:
``transformer_engine/common/recipe/recipe_common.cuh`` (scale from amax), ``.../recipe/delayed_scaling.cu`` (update).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from thunder_te_exec.backends.base import OPERANDS, Backend, Gemm, Matrix, Operand, Quantize
from thunder_te_exec.backends.blocks import dequantize_blocks, quantize_blocks
from thunder_te_exec.backends.rounding import FLOAT32_MAX, amax_of, divide, quantize, scale_from_amax
from thunder_te_exec.layouts import block_shape
from thunder_te_exec.recipe import DelayedScaling, Product, TensorRole, fp8_dtype, quantization_params
from thunder_te_exec.state import AmaxGroup, AmaxSlot

__all__ = ["ReferenceBackend", "dequantize", "update_scales_unfused"]


class ReferenceBackend(Backend):
    """Quantizers and GEMMs in plain torch."""

    name = "reference"

    def why_not(self, device: torch.device, recipe: Any) -> str:
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
        if block_shape(recipe, role) is not None:
            return functools.partial(quantize_blocks, recipe, role, rowwise, columnwise)
        dtype = fp8_dtype(recipe, role)
        fp8_max = torch.finfo(dtype).max
        params = quantization_params(recipe, role)

        def delayed(x: torch.Tensor) -> Operand:
            torch.maximum(slot.amax, amax_of(x), out=slot.amax)
            return in_directions(x, slot.scale)

        def current(x: torch.Tensor) -> Operand:
            scale = scale_from_amax(
                amax_of(x), fp8_max, power_2_scale=params.power_2_scale, amax_epsilon=params.amax_epsilon
            )
            return in_directions(x, scale)

        def in_directions(x: torch.Tensor, scale: torch.Tensor) -> Operand:
            data, scale_inv = quantize(x, scale, dtype), 1.0 / scale
            return Operand(
                (data, scale_inv) if rowwise else None, (data.t().contiguous(), scale_inv) if columnwise else None
            )

        return current if slot is None else delayed

    def gemm(self, recipe: Any, product: Product, out_dtype: torch.dtype) -> Gemm:
        (a_role, a_columnwise), (b_role, b_columnwise) = OPERANDS[product]
        if block_shape(recipe, a_role) is None:
            a_dtype, b_dtype = fp8_dtype(recipe, a_role), fp8_dtype(recipe, b_role)

            def product_of(a: Matrix, b: Matrix) -> torch.Tensor:
                # The product of two FP8 numbers is exact in float32: scales can be applied to the sum, as cuBLAS does.
                return (a[0].view(a_dtype).float() @ b[0].view(b_dtype).float().t()).mul_(a[1] * b[1])
        else:

            def product_of(a: Matrix, b: Matrix) -> torch.Tensor:
                x = dequantize_blocks(recipe, a_role, a, columnwise=a_columnwise)
                return x @ dequantize_blocks(recipe, b_role, b, columnwise=b_columnwise).t()

        def gemm(a: Matrix, b: Matrix, bias: torch.Tensor | None, into: torch.Tensor | None = None) -> torch.Tensor:
            out = product_of(a, b)
            if bias is not None:
                out += bias
            return out.to(out_dtype) if into is None else into.copy_(out.add_(into))

        return gemm

    def update_scales(self, group: AmaxGroup, recipe: Any) -> None:
        update_scales_unfused(group, recipe)


def dequantize(recipe: Any, role: TensorRole, rowwise: Matrix) -> torch.Tensor:
    """The numbers of the row-wise matrix of a tensor, in float32 or higher."""
    if block_shape(recipe, role) is not None:
        return dequantize_blocks(recipe, role, rowwise, columnwise=False)
    data, scale_inv = rowwise
    return data.view(fp8_dtype(recipe, role)).float() * scale_inv


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
    new = (divide(fp8_max, amax) / 2.0**recipe.margin).clamp(max=FLOAT32_MAX)
    scale.copy_(torch.where(amax.isfinite() & (amax > 0), new, scale))
