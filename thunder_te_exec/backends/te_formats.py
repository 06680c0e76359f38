"""Transformer Engine's quantizers and quantized storages, to and from the plain tensors that traces carry.

For each recipe: which quantizer makes an operand, which of its storage's tensors are the operand's matrices, and which
storage a GEMM reads them from. Column-wise matrices of all but MXFP8 are transposed, and given to a GEMM as row-wise.
Scales of MXFP8 and NVFP4 are kept as quantizers give them; a GEMM swizzles them each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.backends.base import Matrix, Operand
from thunder_te_exec.layouts import block_shape
from thunder_te_exec.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TensorRole,
    fp8_dtype,
    quantization_params,
)
from thunder_te_exec.state import AmaxSlot

__all__ = ["quantizer_and_reader", "storage_maker"]


def quantizer_and_reader(
    recipe: Any,
    role: TensorRole,
    slot: AmaxSlot | None,
    device: torch.device,
    *,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Any, Callable[[Any], Operand]]:
    """A quantizer for tensors of ``role``, and what reads the operand from the storage that it gives."""
    block = block_shape(recipe, role)
    if block is None:
        return _per_tensor(recipe, role, slot, device, rowwise, columnwise)
    params = quantization_params(recipe, role)
    usage = {"rowwise": rowwise, "columnwise": columnwise}
    if isinstance(recipe, NVFP4BlockScaling):
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

        quantizer = NVFP4Quantizer(
            with_rht=params.random_hadamard_transform,
            with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            **usage,
        )
        return quantizer, _reader(("data", "scale_inv", "amax"), rowwise, columnwise)
    dtype = compat.te_dtype(fp8_dtype(recipe, role))
    if isinstance(recipe, MXFP8BlockScaling):
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        quantizer = MXFP8Quantizer(dtype, with_2d_quantization=block[0] > 1, **usage)
    else:
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        quantizer = Float8BlockQuantizer(
            dtype,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=2 if block[0] > 1 else 1,
            **usage,
        )
    return quantizer, _reader(("data", "scale_inv"), rowwise, columnwise)


def _reader(parts: tuple[str, ...], rowwise: bool, columnwise: bool) -> Callable[[Any], Operand]:
    def names(direction: str) -> tuple[str, ...]:
        return tuple(f"_amax_{direction}" if part == "amax" else f"_{direction}_{part}" for part in parts)

    row_names, column_names = names("rowwise"), names("columnwise")

    def read(q: Any) -> Operand:
        return Operand(
            tuple(getattr(q, name) for name in row_names) if rowwise else None,
            tuple(getattr(q, name) for name in column_names) if columnwise else None,
        )

    return read


def _per_tensor(
    recipe: Any, role: TensorRole, slot: AmaxSlot | None, device: torch.device, rowwise: bool, columnwise: bool
) -> tuple[Any, Callable[[Any], Operand]]:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    dtype = compat.te_dtype(fp8_dtype(recipe, role))
    # TE's cast-transpose kernel writes the row-wise copy whether or not it is wanted.
    usage = {"rowwise": True, "columnwise": columnwise}
    if slot is not None:
        quantizer = Float8Quantizer(slot.scale[0], slot.amax, dtype, **usage)
    else:
        params = quantization_params(recipe, role)
        quantizer = Float8CurrentScalingQuantizer(
            dtype, device, force_pow_2_scales=params.power_2_scale, amax_epsilon=params.amax_epsilon, **usage
        )

    def read(q: Any) -> Operand:
        transpose = q._transpose
        if columnwise and transpose is None:
            # From Blackwell on, TE's GEMM also reads the other layout, and its quantizer makes no transpose.
            transpose = tex.fp8_transpose(q._data, dtype, out=None)
        return Operand((q._data, q._scale_inv) if rowwise else None, (transpose, q._scale_inv) if columnwise else None)

    return quantizer, read


def storage_maker(
    recipe: Any, role: TensorRole, fake_dtype: torch.dtype, *, columnwise: bool
) -> Callable[[Matrix], Any]:
    """What makes the storage that a GEMM reads from a matrix of a tensor of ``role``."""
    block = block_shape(recipe, role)
    if isinstance(recipe, NVFP4BlockScaling):
        return _nvfp4_storage(fake_dtype)
    dtype = compat.te_dtype(fp8_dtype(recipe, role))
    if block is None:
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

        def per_tensor(matrix: Matrix) -> Any:
            data, scale_inv = matrix
            return Float8TensorStorage(data=data, fp8_scale_inv=scale_inv, fp8_dtype=dtype, fake_dtype=fake_dtype)

        return per_tensor
    if isinstance(recipe, Float8BlockScaling):
        from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
            Float8BlockwiseQTensorStorage,
        )

        def float8_blocks(matrix: Matrix) -> Any:
            return Float8BlockwiseQTensorStorage(
                matrix[0], matrix[1], None, None, dtype, None, block[0] > 1, fake_dtype=fake_dtype
            )

        return float8_blocks
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    def mxfp8(matrix: Matrix) -> Any:
        both = (None, None, *matrix) if columnwise else (*matrix, None, None)
        return MXFP8TensorStorage(*both, dtype, None, False, fake_dtype=fake_dtype)

    return mxfp8


def _nvfp4_storage(fake_dtype: torch.dtype) -> Callable[[Matrix], Any]:
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    def nvfp4(matrix: Matrix) -> Any:
        data, scale_inv, amax = matrix
        return NVFP4TensorStorage(
            data, scale_inv, None, None, amax, None, DType.kFloat4E2M1, None, False, fake_dtype=fake_dtype
        )

    return nvfp4
