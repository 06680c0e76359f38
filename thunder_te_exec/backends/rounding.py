"""Amaxes, scales and rounding to FP8 in plain torch, bit for bit as Transformer Engine's kernels.

Formulas are those of Transformer Engine 2.20: ``transformer_engine/common/recipe/recipe_common.cuh`` (scale from amax).
"""

from __future__ import annotations

import torch

__all__ = ["FLOAT32_MAX", "amax_of", "divide", "magnitudes", "quantize", "scale_from_amax"]

FLOAT32_MAX = torch.finfo(torch.float32).max


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes of ``x``, float32, and 0 for NaN, which an amax leaves out, as CUDA's ``fmaxf`` in TE's kernels."""
    return x.detach().abs().float().nan_to_num_(nan=0.0, posinf=float("inf"))


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in ``x``, float32 (1,)."""
    return magnitudes(x).amax().reshape(1)


def divide(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """``numerator / x`` in float32, rounded once."""
    # `number / tensor` is `tensor.reciprocal() * number` in torch: rounded twice.
    return torch.full_like(x, numerator) / x


def scale_from_amax(
    amax: torch.Tensor,
    fp8_max: float,
    *,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    largest: float = FLOAT32_MAX,
) -> torch.Tensor:
    """``fp8_max / amax``, float32 as ``amax``: 1 where amax is 0 or not finite, ``largest`` where it overflows."""
    amax = amax.clamp(min=amax_epsilon)
    scale = divide(fp8_max, amax)
    scale = torch.where(scale.isinf(), torch.full_like(scale, largest), scale)
    if power_2_scale:
        # Keep sign and exponent of the float32: rounds down to a power of two.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(amax.isfinite() & (amax > 0), scale, torch.ones_like(scale))


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x * scale`` in float32, saturated and rounded to nearest even in ``dtype``, as uint8 of the same shape."""
    fp8_max = torch.finfo(dtype).max
    return (x.float() * scale).clamp_(-fp8_max, fp8_max).to(dtype).view(torch.uint8)
