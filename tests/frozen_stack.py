"""A stack of frozen and trained linears for tests of quantize_frozen_, its steps and its numbers."""

from __future__ import annotations


import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from thunder_te_exec import te_ex
from thunder_te_exec.fp8_weight import Fp8Weight
from thunder_te_exec.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from torch import nn

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Frozen weights, of shapes that are no multiple of a block, around a trained linear; trained biases."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 208), nn.Linear(208, 144), nn.Linear(144, 32)).to(dtype)
    for i in (0, 2):
        module[i].weight.requires_grad_(False)
    return module


def compiled(module: nn.Module, recipe: str, **options):
    return thunder.jit(module, executors=[te_ex], te_fp8_recipe=RECIPES[recipe](), **options)


def step(function, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and the gradients of what is trained."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.requires_grad)]


def numbers(module: nn.Module) -> list[torch.Tensor]:
    return [p.dequantize() if isinstance(p, Fp8Weight) else p.detach() for p in module.parameters()]
