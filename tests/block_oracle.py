"""An independent oracle for block scaling: numpy loops over blocks, and a linear whose three products are explicit.

Written from the formats and the recipes' documentation, sharing no code with the package. Each product quantizes its
operands along its own contraction, so that forward and backward see different numbers of one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from oracle import E4M3, E5M2, float32_scale, largest, round_to_fp8

E2M1 = {"mantissa": 1, "min_exponent": 0, "max": 6.0}

#: float64 matrix, rows along the contraction -> the same numbers as the format represents them.
Represent = Callable[[np.ndarray], np.ndarray]


def by_blocks(x: np.ndarray, block: tuple[int, int], of_block: Represent) -> np.ndarray:
    out = np.empty_like(x)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            here = np.s_[i : i + block[0], j : j + block[1]]
            out[here] = of_block(x[here])
    return out


def float8_blocks(fmt: dict, block: tuple[int, int], *, power_2: bool = True) -> Represent:
    def of_block(x: np.ndarray) -> np.ndarray:
        scale = float32_scale(largest(x), fmt, power_2=power_2)
        product = (x.astype(np.float32) * np.float32(scale)).astype(np.float64)
        return round_to_fp8(product, fmt) * float(np.float32(1) / np.float32(scale))

    return lambda x: by_blocks(x, block, of_block)


def mxfp8(fmt: dict, block: tuple[int, int] = (1, 32)) -> Represent:
    def of_block(x: np.ndarray) -> np.ndarray:
        amax = largest(x)
        scale = 2.0 ** max(math.ceil(math.log2(amax / fmt["max"])), -127) if amax else 2.0**-127
        return round_to_fp8(x / scale, fmt) * scale

    return lambda x: by_blocks(x, block, of_block)


def hadamard_16() -> np.ndarray:
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    h = [[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]
    return np.diag(signs) @ np.array(h) / 4.0


def transformed(x: np.ndarray) -> np.ndarray:
    y = (x.reshape(-1, 16) @ hadamard_16()).reshape(x.shape)
    return torch.from_numpy(y).to(torch.bfloat16).double().numpy()


def nvfp4(block: tuple[int, int] = (1, 16)) -> Represent:
    f = np.float32

    def represent(x: np.ndarray) -> np.ndarray:
        amax = largest(x)
        encode = f(1) if amax == 0 else f(6 * 448) / f(amax)

        def of_block(b: np.ndarray) -> np.ndarray:
            scale = round_to_fp8(np.array(float(f(largest(b)) * (encode * f(1 / 6)))), E4M3)
            if scale == 0:
                return np.zeros_like(b)
            inverse = f(1) / (f(scale) * (f(1) / encode))
            codes = round_to_fp8((b.astype(f) * inverse).astype(np.float64), E2M1)
            return codes * float(scale) * amax / (6 * 448)

        return by_blocks(x, block, of_block)

    return represent


@dataclass
class BlockLinear:
    """A linear under block scaling: how each role is represented row-wise, and column-wise (given the transpose)."""

    input: tuple[Represent, Represent]
    weight: tuple[Represent, Represent]
    grad: tuple[Represent, Represent]

    def __call__(self, a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _Products.apply(a, w, bias, self)

    def end_of_forward(self) -> None:
        """Block scaling has no state."""

    end_of_backward = end_of_forward


def _double(t: torch.Tensor) -> np.ndarray:
    return t.detach().double().numpy()


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, w, bias, linear):
        ctx.save_for_backward(a, w)
        ctx.linear, ctx.bias = linear, bias is not None
        y = torch.from_numpy(linear.input[0](_double(a)) @ linear.weight[0](_double(w)).T)
        return (y if bias is None else y + bias.double()).to(a.dtype)

    @staticmethod
    def backward(ctx, g):
        (a, w), linear = ctx.saved_tensors, ctx.linear
        grad_a = linear.grad[0](_double(g)) @ linear.weight[1](_double(w).T).T
        grad_w = linear.grad[1](_double(g).T) @ linear.input[1](_double(a).T).T
        grad_b = g.double().sum(0).to(g.dtype) if ctx.bias else None
        return torch.from_numpy(grad_a).to(g.dtype), torch.from_numpy(grad_w).to(g.dtype), grad_b, None


def block_linear(recipe) -> BlockLinear:
    """The oracle for a block recipe of :mod:`thunder_te_exec.recipe`, reading its public fields."""
    backward = E5M2 if recipe.fp8_format.name == "HYBRID" else E4M3
    kind = type(recipe).__name__
    if kind == "MXFP8BlockScaling":
        weight = mxfp8(E4M3, (32, 32) if recipe.enable_2d_quantization else (1, 32))
        return BlockLinear((mxfp8(E4M3),) * 2, (weight,) * 2, (mxfp8(backward),) * 2)
    if kind == "NVFP4BlockScaling":
        weight = nvfp4((1, 16) if recipe.disable_2d_quantization else (16, 16))
        columnwise = nvfp4() if recipe.disable_rht else lambda x: nvfp4()(transformed(x))
        return BlockLinear((nvfp4(), columnwise), (weight,) * 2, (nvfp4(), columnwise))
    made = []
    for name, fmt, params in (
        ("x", E4M3, recipe.fp8_quant_fwd_inp),
        ("w", E4M3, recipe.fp8_quant_fwd_weight),
        ("grad", backward, recipe.fp8_quant_bwd_grad),
    ):
        block = (128 if getattr(recipe, f"{name}_block_scaling_dim") == 2 else 1, 128)
        made.append((float8_blocks(fmt, block, power_2=params.power_2_scale),) * 2)
    return BlockLinear(*made)
