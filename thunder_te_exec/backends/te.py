"""Transformer Engine's quantizers, GEMMs and fused scale update, on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.backends.base import Backend, Gemm, Operand, Quantize
from thunder_te_exec.backends.reference import update_scales_unfused
from thunder_te_exec.recipe import TensorRole, fp8_dtype
from thunder_te_exec.state import AmaxGroup, AmaxSlot

__all__ = ["TransformerEngineBackend"]


class TransformerEngineBackend(Backend):
    """Runs on devices of compute capability 8.9 and higher."""

    name = "te"

    def why_not(self, device: torch.device) -> str:
        if device.type != "cuda":
            return "Transformer Engine runs on CUDA only; te_backend='reference' runs anywhere"
        why = compat.te_import_error()
        if why:
            return why
        import transformer_engine.pytorch as te

        available, reason = te.is_fp8_available(return_reason=True)
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
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

        dtype = _te_dtype(fp8_dtype(recipe, role))
        # TE's cast-transpose kernel writes the row-wise copy whether or not it is wanted.
        usage = {"rowwise": True, "columnwise": columnwise}
        if slot is not None:
            quantizer = Float8Quantizer(slot.scale[0], slot.amax, dtype, **usage)
        else:
            params = getattr(recipe, role.value)
            quantizer = Float8CurrentScalingQuantizer(
                dtype,
                device,
                force_pow_2_scales=params.power_2_scale,
                amax_epsilon=params.amax_epsilon,
                **usage,
            )
        quantizer.internal = True  # gives a plain storage object, which costs less than a tensor subclass
        run = tex.quantize

        def quantize(x: torch.Tensor) -> Operand:
            q = run(x, quantizer)
            transpose = q._transpose
            if columnwise and transpose is None:
                # From Blackwell on, TE's GEMM also reads the other layout, and its quantizer makes no transpose.
                transpose = tex.fp8_transpose(q._data, dtype)
            return Operand(q._data if rowwise else None, transpose, q._scale_inv)

        return quantize

    def gemm(
        self, a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype, *, use_split_accumulator: bool
    ) -> Gemm:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

        a_te, b_te = _te_dtype(a_dtype), _te_dtype(b_dtype)

        def storage(data, scale_inv, dtype):
            return Float8TensorStorage(data=data, fp8_scale_inv=scale_inv, fp8_dtype=dtype, fake_dtype=out_dtype)

        def gemm(a, a_scale_inv, b, b_scale_inv, bias):
            # cuBLAS has no FP8 GEMM with a float32 bias. TE rounds such a bias to bfloat16; adding it keeps its bits.
            add_after = bias is not None and bias.dtype is torch.float32
            # TE's matrices are column-major, so its first operand gives the output's columns.
            out, *_ = general_gemm(
                storage(b, b_scale_inv, b_te),
                storage(a, a_scale_inv, a_te),
                out_dtype=out_dtype,
                layout="TN",
                bias=None if add_after else bias,
                use_split_accumulator=use_split_accumulator,
            )
            return out.add_(bias) if add_after else out

        return gemm

    def update_scales(self, group: AmaxGroup, recipe: Any) -> None:
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
            update_scales_unfused(group, recipe)
            return
        import transformer_engine_torch as tex

        tex.fused_amax_and_scale_update_after_reduction(
            group.history[0],
            [group.history],
            [group.scale],
            recipe.amax_compute_algo,
            _te_dtype(group.dtype),
            recipe.margin,
        )


def _te_dtype(dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.constants import DType

    return DType.kFloat8E4M3 if dtype is torch.float8_e4m3fn else DType.kFloat8E5M2
