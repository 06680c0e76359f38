"""Shapes: which linears a recipe can run, and what its quantized matrices look like.

A quantized matrix is a few plain tensors: its data, its scales, and under NVFP4 the amax that its tensor's scale comes
from. Layouts are those of Transformer Engine 2.20 (``get_scale_shape`` of its quantizers): for a matrix of r rows and c
columns whose rows lie along the contraction,

===================  ===============  ====================================================
per-tensor           uint8 (r, c)     float32 (1,)
Float8Block 1 x 128  uint8 (r, c)     float32 (ceil(c/128), r padded to 4), transposed
Float8Block 2-d      uint8 (r, c)     float32 (ceil(r/128), ceil(c/128) padded to 4)
MXFP8                uint8 (r, c)     uint8 E8M0 (r padded to 128, c/32 padded to 4)
NVFP4                uint8 (r, c/2)   uint8 E4M3 (r padded to 128, c/16 padded to 4), float32 (1,)
===================  ===============  ====================================================

The row-wise copy of a tensor (R, C) is the matrix (R, C), the column-wise one the matrix (C, R): its transpose. MXFP8
keeps data and scales of the column-wise copy transposed back, as its GEMM reads them: uint8 (R, C) and uint8
(R/32 padded to 4, C padded to 128). Padding of scales is not read.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from thunder_te_exec.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TensorRole,
    quantization_params,
)

__all__ = ["TensorSpec", "alignment", "block_shape", "is_transposable", "operand_specs"]


class TensorSpec(NamedTuple):
    """Shape and type of one of the tensors that a quantized matrix consists of."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def alignment(recipe: Any) -> int:
    """What rows of the input, input features and output features must be multiples of.

    FP8 GEMMs read each operand along the contraction in 16-byte units, in each of the three products, and each of the
    three sizes is contracted over once. Transformer Engine accepts rows in multiples of 8, and fails in wgrad then;
    which gradients are wanted is not known yet when a linear is claimed. FP4 puts 32 numbers into 16 bytes; MXFP8 has
    whole blocks of 32 only.
    """
    return 32 if isinstance(recipe, (MXFP8BlockScaling, NVFP4BlockScaling)) else 16


def block_shape(recipe: Any, role: TensorRole) -> tuple[int, int] | None:
    """Rows and columns (along the contraction) that share a scale; None where a tensor has one scale."""
    if isinstance(recipe, Float8BlockScaling):
        names = {TensorRole.INPUT: "x", TensorRole.WEIGHT: "w", TensorRole.GRAD_OUTPUT: "grad"}
        return (128 if getattr(recipe, f"{names[role]}_block_scaling_dim") == 2 else 1, 128)
    if isinstance(recipe, MXFP8BlockScaling):
        return (32 if recipe.enable_2d_quantization and role is TensorRole.WEIGHT else 1, 32)
    if isinstance(recipe, NVFP4BlockScaling):
        return (16 if quantization_params(recipe, role).fp4_2d_quantization else 1, 16)
    return None


def is_transposable(recipe: Any, role: TensorRole) -> bool:
    """Whether the column-wise copy is the row-wise one with rows and columns exchanged, and can be made of it.

    It is where both directions have the same scales. MXFP8 and NVFP4 are left out: their weights may have square
    blocks, but packed or padded otherwise.
    """
    block = block_shape(recipe, role)
    return block is None or (isinstance(recipe, Float8BlockScaling) and block[0] == block[1])


def operand_specs(
    recipe: Any, role: TensorRole, shape: tuple[int, int], *, columnwise: bool = False
) -> tuple[TensorSpec, ...]:
    """The tensors that the row-wise, or column-wise, copy of a tensor of ``shape`` and ``role`` consists of."""
    block = block_shape(recipe, role)
    rows, cols = reversed(shape) if columnwise else shape
    if block is None:
        return TensorSpec((rows, cols), torch.uint8), TensorSpec((1,), torch.float32)
    scales = (math.ceil(rows / block[0]), math.ceil(cols / block[1]))
    if isinstance(recipe, Float8BlockScaling):
        outer, inner = scales if block[0] > 1 else reversed(scales)
        return TensorSpec((rows, cols), torch.uint8), TensorSpec((outer, _padded(inner, 4)), torch.float32)
    padded = (_padded(rows, 128), _padded(scales[1], 4))
    if isinstance(recipe, MXFP8BlockScaling):
        back = reversed if columnwise else tuple
        return TensorSpec(tuple(back((rows, cols))), torch.uint8), TensorSpec(tuple(back(padded)), torch.uint8)
    data = TensorSpec((rows, cols // 2), torch.uint8)
    return data, TensorSpec(padded, torch.uint8), TensorSpec((1,), torch.float32)


def _padded(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple
