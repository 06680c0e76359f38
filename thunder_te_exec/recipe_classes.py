"""Recipe classes for machines without Transformer Engine, with the names, fields and defaults of its release 2.20.

Defaults that Transformer Engine takes from other environment variables than the one named below are its plain ones.

Import them from :mod:`thunder_te_exec.recipe`, which gives Transformer Engine's own where it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

__all__ = ["DelayedScaling", "Float8CurrentScaling", "Format", "MMParams", "QParams", "Recipe"]


class _FormatMax(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """FP8 formats. ``HYBRID`` is E4M3 in forward and E5M2 for gradients."""

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
    from.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


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


def _reject_pure_e5m2(recipe: Any) -> None:
    if recipe.fp8_format is Format.E5M2:
        raise AssertionError("Pure E5M2 training is not supported.")
