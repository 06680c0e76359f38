"""Recipe classes for machines without Transformer Engine, with the names, fields and defaults of its release 2.20.

Defaults that Transformer Engine takes from environment variables other than those named below are its plain ones.

Import them from :mod:`thunder_te_exec.recipe`, which gives Transformer Engine's own where it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


class _FormatMax(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Formats of 8 and 4 bits. ``HYBRID`` is E4M3 in forward and E5M2 for gradients."""

    E2M1 = _FormatMax(6.0, 6.0)
    E4M3 = _FormatMax(448.0, 448.0)
    E5M2 = _FormatMax(57344.0, 57344.0)
    HYBRID = _FormatMax(448.0, 57344.0)


@dataclass(frozen=True)
class MMParams:
    """GEMM options. ``use_split_accumulator``: accumulate in full float32 (False is Hopper's fast accumulation)."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Quantization options of one operand.

    ``power_2_scale``: round the scale down to a power of two. ``amax_epsilon``: smallest amax that a scale is computed
    from. The others are NVFP4's: ``random_hadamard_transform`` of the column-wise copy, ``stochastic_rounding``, and
    ``fp4_2d_quantization``, blocks of 16 x 16 instead of 1 x 16.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """Base class of the recipes."""


@dataclass
class DelayedScaling(Recipe):
    """Scale from the amax history of earlier steps.

    ``scale = (fp8_max / amax) / 2**margin`` where ``amax`` is taken from the last ``amax_history_len`` steps by
    ``amax_compute_algo``: "max", "most_recent", or a function of the float32 history (length, tensors) that returns
    (tensors,). ``scaling_factor_compute_algo(amax, scale, fp8_max, recipe)`` replaces the formula.
    """

    margin: int = 0
    fp8_format: Any = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _reject_pure_e5m2(self)


@dataclass
class Float8CurrentScaling(Recipe):
    """Scale from the tensor that is quantized: ``scale = fp8_max / amax(tensor)``.

    ``fp8_quant_fwd_inp``, ``fp8_quant_fwd_weight`` and ``fp8_quant_bwd_grad`` are, as in Transformer Engine, no
    constructor arguments: assign a :class:`QParams` to change one. Their default follows the environment variable
    ``NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES``, as does ``use_power_2_scales``, which is not read otherwise.
    """

    use_power_2_scales: bool = os.getenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1"
    fp8_format: Any = Format.HYBRID
    fp8_quant_fwd_inp = QParams(power_2_scale=use_power_2_scales)
    fp8_quant_fwd_weight = QParams(power_2_scale=use_power_2_scales)
    fp8_quant_bwd_grad = QParams(power_2_scale=use_power_2_scales)
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _reject_pure_e5m2(self)


@dataclass
class Float8BlockScaling(Recipe):
    """A scale for each block of 128 numbers along the contraction, or of 128 x 128.

    ``*_block_scaling_dim`` is 1 or 2, for the input, the weight and the output's gradient; of two operands that are
    multiplied one at most may have 2. Scales are float32, by default powers of two; the environment variable
    ``NVTE_FP8_BLOCK_SCALING_FP32_SCALES`` relaxes that. ``fp8_quant_*`` are no constructor arguments, as in
    :class:`Float8CurrentScaling`.
    """

    use_f32_scales: bool = os.getenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1"
    fp8_format: Any = Format.E4M3
    fp8_quant_fwd_inp = QParams(power_2_scale=not use_f32_scales)
    fp8_quant_fwd_weight = QParams(power_2_scale=not use_f32_scales)
    fp8_quant_bwd_grad = QParams(power_2_scale=not use_f32_scales)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        assert all(dim in (1, 2) for dim in dims), "Only 1D or 2D blocks supported"
        assert sum(dim == 2 for dim in dims) < 2, "2D by 2D block gemm not supported."
        _reject_pure_e5m2(self)


@dataclass
class MXFP8BlockScaling(Recipe):
    """A scale, a power of two in 8 bits (E8M0), for each block of 32 numbers along the contraction.

    ``enable_2d_quantization``: blocks of 32 x 32 for weights. ``margin`` is not read.
    """

    margin: int = 0
    fp8_format: Any = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        _reject_pure_e5m2(self)


@dataclass
class NVFP4BlockScaling(Recipe):
    """Four bits (E2M1), an E4M3 scale for each block of 16 numbers along the contraction, and one of the tensor.

    By default weights have blocks of 16 x 16, gradients are rounded stochastically, and both operands of wgrad go
    through a random Hadamard transform (arXiv:2509.25149).
    """

    disable_rht: bool = os.getenv("NVTE_NVFP4_DISABLE_RHT", "0") == "1"
    disable_stochastic_rounding: bool = os.getenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "0") == "1"
    disable_2d_quantization: bool = os.getenv("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "0") == "1"
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Any = Format.E2M1
    fp8_format: Any = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        assert self.fp4_format == Format.E2M1, "Only E2M1 is supported for NVFP4 scaling"
        assert self.fp8_format == Format.E4M3, "Only E4M3 is supported for NVFP4 scaling"
        transformed, rounded = not self.disable_rht, not self.disable_stochastic_rounding
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=transformed)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(random_hadamard_transform=transformed, stochastic_rounding=rounded)


def _reject_pure_e5m2(recipe: Any) -> None:
    if recipe.fp8_format is Format.E5M2:
        raise AssertionError("Pure E5M2 training is not supported.")
