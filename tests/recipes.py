"""The recipes that numbers are tested under, by name."""

from __future__ import annotations

from thunder_te_exec.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)


def powers_of_two() -> Float8CurrentScaling:
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = QParams(power_2_scale=True)
    return recipe


def float8_blocks(input: int = 1, weight: int = 2, grad: int = 1, **params) -> Float8BlockScaling:
    recipe = Float8BlockScaling(x_block_scaling_dim=input, w_block_scaling_dim=weight, grad_block_scaling_dim=grad)
    if params:
        recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = QParams(**params)
    return recipe


#: One scale a tensor.
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=3),
    "delayed-most-recent": lambda: DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    "delayed-e4m3": lambda: DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3),
    "current": Float8CurrentScaling,
    "current-powers-of-two": powers_of_two,
}

#: What Transformer Engine runs on Hopper with block scales.
FLOAT8_BLOCKS = {
    "blocks": float8_blocks,
    "blocks-input-2d": lambda: float8_blocks(2, 1, 1),
    "blocks-gradient-2d": lambda: float8_blocks(1, 1, 2),
    "blocks-float32-scales": lambda: float8_blocks(power_2_scale=False),
    "blocks-epsilon": lambda: float8_blocks(power_2_scale=True, amax_epsilon=1e-3),
    "blocks-hybrid": lambda: Float8BlockScaling(fp8_format=Format.HYBRID),
}

#: What needs Blackwell, and here runs in the reference backend; without stochastic rounding.
MICROSCALING = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp8-hybrid-2d": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "nvfp4": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4-plain": lambda: NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True
    ),
}
