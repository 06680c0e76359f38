"""Running steps of a jitted function, and comparing what they gave bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn


def batch(step: int) -> torch.Tensor:
    """Input of a step, float32 (32, 32), three times as large as that of the step before."""
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(step)) * 3.0**step


def step(function: Callable, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and parameter gradients of one forward and backward of ``function``, jitted ``module``."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
