"""Block scaling in plain torch: a scale for each block of a matrix.

Formulas and layouts are those of Transformer Engine 2.20: ``common/transpose/quantize_transpose_*_blockwise.cu``
(Float8Block), ``common/util/ptx.cuh`` ``float_to_e8m0`` (MXFP8), ``common/cast/nvfp4/core_nvfp4.cuh`` (NVFP4). The
formats are those of the OCP Microscaling specification 1.0 and, for NVFP4, of arXiv:2509.25149.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from thunder_te_exec.backends.base import Matrix, Operand
from thunder_te_exec.backends.rounding import FLOAT32_MAX, divide, magnitudes, quantize, scale_from_amax
from thunder_te_exec.layouts import block_shape, operand_specs
from thunder_te_exec.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TensorRole,
    fp8_dtype,
    quantization_params,
)

__all__ = ["dequantize_blocks", "quantize_blocks"]

_Block = tuple[int, int]


def quantize_blocks(recipe: Any, role: TensorRole, rowwise: bool, columnwise: bool, x: torch.Tensor) -> Operand:
    """``x`` (R, C) as an operand; each direction is quantized from ``x`` itself."""

    def in_direction(matrix: torch.Tensor, columnwise: bool) -> Matrix:
        found = _QUANTIZE[_recipe_class(recipe)](recipe, role, matrix, columnwise)
        specs = operand_specs(recipe, role, tuple(x.shape), columnwise=columnwise)
        return tuple(_padded(t, spec.shape) for t, spec in zip(found, specs))

    return Operand(
        in_direction(x, False) if rowwise else None, in_direction(x.t().contiguous(), True) if columnwise else None
    )


def dequantize_blocks(recipe: Any, role: TensorRole, matrix: Matrix, *, columnwise: bool) -> torch.Tensor:
    """The numbers of a quantized matrix, float64, its rows along the contraction.

    In float32 a number that was rounded up next to the largest one would overflow. Under NVFP4 numbers are not what was
    quantized where the tensor's amax is below 2688 / 3.4e38: the kernels clamp its scale there.
    """
    return _DEQUANTIZE[_recipe_class(recipe)](recipe, role, matrix, columnwise)


def _recipe_class(recipe: Any) -> type:
    return next(c for c in _QUANTIZE if isinstance(recipe, c))


# --- what all of them share -------------------------------------------------------------------------------------------


def _amax(x: torch.Tensor, block: _Block) -> torch.Tensor:
    """Largest magnitude of each block of ``x``, float32 (blocks down, blocks across); NaN is left out."""
    rows, cols = (math.ceil(n / b) for n, b in zip(x.shape, block))
    x = magnitudes(_padded(x, (rows * block[0], cols * block[1])))
    return x.view(rows, block[0], cols, block[1]).amax(dim=(1, 3))


def _spread(scales: torch.Tensor, block: _Block, shape: tuple[int, ...]) -> torch.Tensor:
    """The scale of each number of a matrix of ``shape``."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _padded(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(t.shape) == shape:
        return t.contiguous()
    out = t.new_zeros(shape)
    out[: t.shape[0], : t.shape[1]] = t
    return out


# --- Float8BlockScaling -----------------------------------------------------------------------------------------------


def _quantize_float8(recipe: Any, role: TensorRole, x: torch.Tensor, columnwise: bool) -> Matrix:
    block, dtype, params = block_shape(recipe, role), fp8_dtype(recipe, role), quantization_params(recipe, role)
    scale = scale_from_amax(
        _amax(x, block),
        torch.finfo(dtype).max,
        power_2_scale=params.power_2_scale,
        amax_epsilon=params.amax_epsilon,
        largest=torch.finfo(x.dtype).max,
    )
    scale_inv = divide(1.0, scale)
    return quantize(x, _spread(scale, block, x.shape), dtype), scale_inv if block[0] > 1 else scale_inv.t()


def _dequantize_float8(recipe: Any, role: TensorRole, matrix: Matrix, columnwise: bool) -> torch.Tensor:
    (data, scale_inv), block = matrix, block_shape(recipe, role)
    scales = scale_inv if block[0] > 1 else scale_inv.t()
    return data.view(fp8_dtype(recipe, role)).double() * _spread(scales, block, data.shape)


# --- MXFP8BlockScaling ------------------------------------------------------------------------------------------------

_E8M0_BIAS = 127


def _to_e8m0(x: torch.Tensor) -> torch.Tensor:
    """The power of two that is no smaller than ``x`` (float32, not negative, no NaN), as its biased exponent, uint8."""
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below float32's smallest normal number 2**-127 is there, as exponent 0.
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + up).clamp(max=0xFE).to(torch.uint8)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(biased, dtype=torch.float32), biased.to(torch.int32) - _E8M0_BIAS)


def _quantize_mxfp8(recipe: Any, role: TensorRole, x: torch.Tensor, columnwise: bool) -> Matrix:
    block, dtype = block_shape(recipe, role), fp8_dtype(recipe, role)
    # A product with the rounded reciprocal, as in the kernels.
    exponents = _to_e8m0(_amax(x, block) * torch.tensor(1.0 / torch.finfo(dtype).max, dtype=torch.float32))
    inverse = _power_of_two(2 * _E8M0_BIAS - exponents.to(torch.int32))
    data = quantize(x, _spread(inverse, block, x.shape), dtype)
    exponents = exponents.repeat_interleave(block[0], 0)
    return (data.t(), exponents.t()) if columnwise else (data, exponents)


def _dequantize_mxfp8(recipe: Any, role: TensorRole, matrix: Matrix, columnwise: bool) -> torch.Tensor:
    data, exponents = (t.t() for t in matrix) if columnwise else matrix
    numbers = data.contiguous().view(fp8_dtype(recipe, role)).double()
    return numbers * _spread(_power_of_two(exponents), (1, 32), data.shape)


# --- NVFP4BlockScaling ------------------------------------------------------------------------------------------------

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
#: The signs of the random Hadamard transform: fixed, so that both operands of wgrad get the same ones
#: (``get_wgrad_sign_vector`` of ``transformer_engine.pytorch.tensor.nvfp4_tensor``).
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Each 16 numbers along the rows of ``x`` times diag(signs) H / 4, rounded to the type of ``x``."""
    h = torch.ones(1, 1, device=x.device)
    while h.shape[0] < len(_SIGNS):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    transform = torch.tensor(_SIGNS, dtype=torch.float32, device=x.device)[:, None] * h / math.sqrt(len(_SIGNS))
    return (x.float().view(-1, len(_SIGNS)) @ transform).to(x.dtype).view(x.shape)


def _to_e2m1(x: torch.Tensor, stochastic: bool) -> torch.Tensor:
    """Codes (0 to 15, int64) of ``x``, float32: saturated, and rounded to nearest even or to a random neighbour.

    The neighbour away from zero is taken with the probability of how near it is; torch's generator of the device draws.
    """
    magnitude = x.abs().nan_to_num(nan=_E2M1_MAX).clamp(max=_E2M1_MAX)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    steps = magnitude / spacing
    if stochastic:
        below = steps.floor()
        steps = below + (torch.rand_like(steps) < steps - below)
    else:
        steps = steps.round()
    values = torch.tensor(_E2M1, device=x.device)
    return torch.searchsorted(values, (steps * spacing).clamp(max=_E2M1_MAX)) + 8 * x.signbit()


def _quantize_nvfp4(recipe: Any, role: TensorRole, x: torch.Tensor, columnwise: bool) -> Matrix:
    block, params = block_shape(recipe, role), quantization_params(recipe, role)
    if columnwise and params.random_hadamard_transform:
        x = _hadamard(x)
    blocks = _amax(x, block)
    amax = blocks.amax().reshape(1)
    encode = divide(_E4M3_MAX * _E2M1_MAX, amax).clamp(max=FLOAT32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), torch.ones_like(encode), encode)
    # A product with the rounded reciprocal, as in the kernels.
    scales = blocks * (encode * torch.tensor(1.0 / _E2M1_MAX, dtype=torch.float32))
    scales = scales.clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    inverse = divide(1.0, scales.float() * divide(1.0, encode)).clamp(max=FLOAT32_MAX)
    codes = _to_e2m1(x.float() * _spread(inverse, block, x.shape), params.stochastic_rounding)
    data = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return data, scales.view(torch.uint8).repeat_interleave(block[0], 0), amax


def _dequantize_nvfp4(recipe: Any, role: TensorRole, matrix: Matrix, columnwise: bool) -> torch.Tensor:
    data, scales, amax = matrix
    values = torch.tensor((*_E2M1, *(-v for v in _E2M1)), dtype=torch.float64, device=data.device)
    numbers = values[torch.stack((data & 15, data >> 4), -1).long()].flatten(1)
    of_tensor = amax / (_E4M3_MAX * _E2M1_MAX)
    return numbers * _spread(scales.view(torch.float8_e4m3fn).float(), (1, 16), numbers.shape) * of_tensor


_QUANTIZE: dict[type, Callable[[Any, TensorRole, torch.Tensor, bool], Matrix]] = {
    Float8BlockScaling: _quantize_float8,
    MXFP8BlockScaling: _quantize_mxfp8,
    NVFP4BlockScaling: _quantize_nvfp4,
}
_DEQUANTIZE: dict[type, Callable[[Any, TensorRole, Matrix, bool], torch.Tensor]] = {
    Float8BlockScaling: _dequantize_float8,
    MXFP8BlockScaling: _dequantize_mxfp8,
    NVFP4BlockScaling: _dequantize_nvfp4,
}
