"""Delayed weight gradients with Transformer Engine's kernels: the ordinary backward's bits, and main_grad."""

from __future__ import annotations

import delayed_steps
import pytest
import thunder
import torch
from delayed_steps import Pair, stack
from thunder_te_exec import DelayedWgrad, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}


def batch(n: int, rows: int = 128) -> torch.Tensor:
    return delayed_steps.batch(n, rows, torch.bfloat16, 256).cuda()


def pair(recipe: str, **options) -> Pair:
    return Pair(stack(dtype=torch.bfloat16, features=256).cuda(), te_fp8_recipe=RECIPES[recipe](), **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_the_ordinary_backward_to_the_last_bit(recipe) -> None:
    both = pair(recipe)
    for n in range(4):
        both.backward(batch(n, 128 if n % 2 else 256))
        if n:
            both.wgrads.backward_dw()
    both.wgrads.backward_dw()
    assert both.gradients_are_the_same() and not both.wgrads.need_backward_dw()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gemms_add_to_main_grad(recipe, dtype) -> None:
    both = pair(recipe)
    module = both.modules[1]
    options = {"te_fp8_recipe": RECIPES[recipe](), "te_delay_wgrad": True, "te_fuse_wgrad_accumulation": True}
    fused = thunder.jit(module, executors=[te_ex], **options)
    weights = [module[i].weight for i in (0, 2, 4)]
    for w in weights:
        w.main_grad = torch.zeros_like(w, dtype=dtype)
    for function in (both.ordinary, fused):
        y = function(batch(0))
        y.backward(torch.ones_like(y))
    DelayedWgrad(fused).backward_dw()
    for i, w in zip((0, 2, 4), weights):
        assert w.grad is None
        torch.testing.assert_close(w.main_grad.to(torch.bfloat16), both.modules[0][i].weight.grad)
