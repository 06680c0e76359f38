"""The recipes that numbers are tested under, by name."""

from __future__ import annotations

from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling, Format, QParams


def powers_of_two() -> Float8CurrentScaling:
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = QParams(power_2_scale=True)
    return recipe


RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=3),
    "delayed-most-recent": lambda: DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    "delayed-e4m3": lambda: DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3),
    "current": Float8CurrentScaling,
    "current-powers-of-two": powers_of_two,
}
