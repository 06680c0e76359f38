"""Transformer Engine's quantizers, GEMMs and fused scale update, on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.backends.base import OPERANDS, Backend, Gemm, Matrix, Operand, Quantize
from thunder_te_exec.backends.reference import update_scales_unfused
from thunder_te_exec.backends.te_formats import quantizer_and_reader, storage_maker
from thunder_te_exec.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Product,
    TensorRole,
    has_functions,
    use_split_accumulator,
)
from thunder_te_exec.state import AmaxGroup, AmaxSlot

__all__ = ["TransformerEngineBackend"]


class TransformerEngineBackend(Backend):
    """Runs on devices of compute capability 8.9 and higher; block scaling needs newer ones."""

    name = "te"

    def why_not(self, device: torch.device, recipe: Any) -> str:
        if device.type != "cuda":
            return "Transformer Engine runs on CUDA only; te_backend='reference' runs anywhere"
        why = compat.te_import_error()
        if why:
            return why
        with torch.cuda.device(device):
            available, reason = _availability(recipe)(return_reason=True)
        return "" if available else reason

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
        import transformer_engine_torch as tex

        with torch.cuda.device(device):  # NVFP4's quantizer makes tensors on the current one
            quantizer, read = quantizer_and_reader(recipe, role, slot, device, rowwise=rowwise, columnwise=columnwise)
        quantizer.internal = True  # gives a plain storage object, which costs less than a tensor subclass
        run = tex.quantize

        def quantize(x: torch.Tensor) -> Operand:
            return read(run(x, quantizer))

        return quantize

    def gemm(self, recipe: Any, product: Product, out_dtype: torch.dtype) -> Gemm:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        (a_role, a_columnwise), (b_role, b_columnwise) = OPERANDS[product]
        a_storage = storage_maker(recipe, a_role, out_dtype, columnwise=a_columnwise)
        b_storage = storage_maker(recipe, b_role, out_dtype, columnwise=b_columnwise)
        # TE's matrices are column-major, so its first operand gives the output's columns. Only MXFP8 keeps column-wise
        # copies that are not transposed.
        layout = "TN"
        if isinstance(recipe, MXFP8BlockScaling):
            layout = ("N" if b_columnwise else "T") + ("T" if a_columnwise else "N")
        split = use_split_accumulator(recipe, product)

        def gemm(a: Matrix, b: Matrix, bias: torch.Tensor | None, into: torch.Tensor | None = None) -> torch.Tensor:
            # cuBLAS has no FP8 GEMM with a float32 bias. TE rounds such a bias to bfloat16; adding it keeps its bits.
            add_after = bias is not None and bias.dtype is torch.float32
            out, *_ = general_gemm(
                b_storage(b),
                a_storage(a),
                out_dtype=out_dtype,
                layout=layout,
                bias=None if add_after else bias,
                use_split_accumulator=split,
                out=into,
                accumulate=into is not None,
            )
            return out.add_(bias) if add_after else out

        return gemm

    def _data_transpose(self) -> Callable[[torch.Tensor], torch.Tensor]:
        import transformer_engine_torch as tex

        run, dtype = tex.fp8_transpose, compat.te_dtype(torch.float8_e4m3fn)  # for any type of one byte
        return lambda data: run(data, dtype, out=None)

    def update_scales(self, group: AmaxGroup, recipe: Any) -> None:
        if has_functions(recipe):
            update_scales_unfused(group, recipe)
            return
        import transformer_engine_torch as tex

        tex.fused_amax_and_scale_update_after_reduction(
            group.history[0],
            [group.history],
            [group.scale],
            recipe.amax_compute_algo,
            compat.te_dtype(group.dtype),
            recipe.margin,
        )


def _availability(recipe: Any) -> Callable[..., tuple[bool, str]]:
    """Transformer Engine's own answer to whether this device runs ``recipe``."""
    import transformer_engine.pytorch as te

    by_recipe = {
        Float8BlockScaling: te.is_fp8_block_scaling_available,
        MXFP8BlockScaling: te.is_mxfp8_available,
        NVFP4BlockScaling: te.is_nvfp4_available,
    }
    return next((f for c, f in by_recipe.items() if isinstance(recipe, c)), te.is_fp8_available)
