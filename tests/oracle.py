"""An independent oracle: FP8 by rounding float64 numbers in numpy, gradients by torch's autograd.

Written from the formats and from Transformer Engine's documentation, and sharing no code with the package: quantize and
dequantize both operands of each product, multiply in float64, and let autograd differentiate the straight-through
product; the output's gradient is quantized and dequantized where it enters it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

E4M3 = {"mantissa": 3, "min_exponent": -6, "max": 448.0}
E5M2 = {"mantissa": 2, "min_exponent": -14, "max": 57344.0}


def round_to_fp8(x: np.ndarray, fmt: dict) -> np.ndarray:
    """The nearest number of the format, ties to even, saturated; NaN stays NaN."""
    x = np.clip(x, -fmt["max"], fmt["max"])
    exponent = np.frexp(np.where(np.isfinite(x) & (x != 0), x, 1.0))[1] - 1
    spacing = np.exp2(np.maximum(exponent, fmt["min_exponent"]) - fmt["mantissa"])
    return np.clip(np.rint(x / spacing) * spacing, -fmt["max"], fmt["max"])


def float32_scale(amax: float, fmt: dict, *, margin: int = 0, power_2: bool = False, otherwise: float = 1.0) -> float:
    if not np.isfinite(amax) or amax <= 0:
        return otherwise
    with np.errstate(over="ignore"):
        scale = np.float32(fmt["max"]) / np.float32(amax)
    scale = min(float(scale), float(np.finfo(np.float32).max)) / 2.0**margin
    return 2.0 ** np.floor(np.log2(scale)) if power_2 else scale


def largest(x: np.ndarray) -> float:
    x = np.abs(x[~np.isnan(x)])
    return float(x.max()) if x.size else 0.0


@dataclass
class Scaling:
    """How one tensor is scaled, step by step. ``history_len`` None is current scaling."""

    fmt: dict
    history_len: int | None = None
    algo: str = "max"
    margin: int = 0
    power_2: bool = False
    scale: float = 1.0
    history: list[float] = field(default_factory=list)
    step_amax: float = 0.0

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor as FP8 represents it, float64."""
        x = t.detach().to(torch.float32).double().numpy()
        amax = largest(x)
        if self.history_len is None:
            scale = float32_scale(amax, self.fmt, power_2=self.power_2)
        else:
            self.step_amax, scale = max(self.step_amax, amax), self.scale
        product = (x.astype(np.float32) * np.float32(scale)).astype(np.float64)
        inverse = float(np.float32(1) / np.float32(scale))
        return torch.from_numpy(round_to_fp8(product, self.fmt) * inverse)

    def end_of_step(self) -> None:
        if self.history_len is None:
            return
        # The window holds the last history_len steps, this one included.
        self.history = [*self.history, self.step_amax][-self.history_len :]
        amax = self.step_amax if self.algo == "most_recent" else max(self.history)
        self.scale = float32_scale(amax, self.fmt, margin=self.margin, otherwise=self.scale)
        self.step_amax = 0.0


class _WithGradient(torch.autograd.Function):
    """The same value, whose gradient goes through ``fn``: quantized, or rounded as the product that it is."""

    @staticmethod
    def forward(ctx, y, fn):
        ctx.fn = fn
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.fn(g), None


@dataclass
class OracleLinear:
    """A linear under one recipe; call it, differentiate, then ``end_of_forward`` and ``end_of_backward``."""

    input: Scaling
    weight: Scaling
    grad: Scaling

    def __call__(self, a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        dtype = a.dtype

        def rounded(g: torch.Tensor) -> torch.Tensor:
            return g.to(dtype).double()

        x = a.double() + (self.input(a) - a.double()).detach()
        q = w.double() + (self.weight(w) - w.double()).detach()
        y = _WithGradient.apply(x, rounded) @ _WithGradient.apply(q, rounded).t()
        y = _WithGradient.apply(y, self.grad)
        if bias is not None:
            y = y + _WithGradient.apply(bias.double(), rounded)
        return _RoundOutput.apply(y, dtype)

    def end_of_forward(self) -> None:
        self.input.end_of_step()
        self.weight.end_of_step()

    def end_of_backward(self) -> None:
        self.grad.end_of_step()


class _RoundOutput(torch.autograd.Function):
    """The product is rounded once to the output's type; its gradient arrives in that type."""

    @staticmethod
    def forward(ctx, y, dtype):
        return y.to(dtype)

    @staticmethod
    def backward(ctx, g):
        return g.double(), None


def oracle_linear(recipe) -> OracleLinear:
    """The oracle for a recipe of :mod:`thunder_te_exec.recipe`, reading its public fields."""
    name = recipe.fp8_format.name
    forward, backward = {"E4M3": (E4M3, E4M3), "HYBRID": (E4M3, E5M2)}[name]
    if type(recipe).__name__ == "DelayedScaling":
        options = {
            "history_len": recipe.amax_history_len,
            "algo": recipe.amax_compute_algo,
            "margin": recipe.margin,
        }
        return OracleLinear(Scaling(forward, **options), Scaling(forward, **options), Scaling(backward, **options))
    return OracleLinear(
        Scaling(forward, power_2=recipe.fp8_quant_fwd_inp.power_2_scale),
        Scaling(forward, power_2=recipe.fp8_quant_fwd_weight.power_2_scale),
        Scaling(backward, power_2=recipe.fp8_quant_bwd_grad.power_2_scale),
    )


def close_to_one_rounding(actual: torch.Tensor, exact: torch.Tensor, terms: int, magnitude: float) -> None:
    """``actual`` is ``exact`` but for float32 accumulation of ``terms`` products and one rounding to its type.

    The bound is the textbook one: each of ``terms`` additions of numbers no larger than ``magnitude`` in all errs by at
    most float32's unit roundoff of it, and the result is rounded once; the oracle rounded its result once too.
    """
    assert actual.shape == exact.shape and actual.dtype == exact.dtype
    a, e = actual.double(), exact.double()
    bound = terms * 2.0**-24 * magnitude + torch.finfo(actual.dtype).eps * e.abs() + torch.finfo(actual.dtype).tiny
    worst = ((a - e).abs() - bound).max()
    assert worst <= 0, f"off by {worst.item():.3g} more than {bound.max().item():.3g} allows"
