"""A module and its copy, the one jitted as ever and the other with delayed weight gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from steps import same
from thunder_te_exec import DelayedWgrad, te_ex
from torch import nn


class Pair:
    """``module`` jitted without, and a copy with delayed weight gradients.

    Attributes:
        ordinary, delayed: the jitted modules.
        wgrads: of ``delayed``.
    """

    def __init__(self, module: nn.Module, executors: Sequence[Any] = (te_ex,), jit=thunder.jit, **options: Any) -> None:
        self.modules = module, copy.deepcopy(module)
        self.ordinary = jit(self.modules[0], executors=list(executors), **options)
        self.delayed = jit(self.modules[1], executors=list(executors), te_delay_wgrad=True, **options)
        self.wgrads = DelayedWgrad(self.delayed)

    def backward(self, x: torch.Tensor) -> None:
        """A forward and a backward of both; outputs and the input's gradients are the same bits."""
        found = []
        for function in (self.ordinary, self.delayed):
            inputs = x.clone().requires_grad_(x.is_floating_point())
            y = function(inputs)
            y.backward(torch.ones_like(y) * 0.1)
            found.append([y.detach(), *([inputs.grad] if inputs.requires_grad else [])])
        assert same(*found)

    def gradients_are_the_same(self) -> bool:
        ordinary, delayed = ({n: p.grad for n, p in m.named_parameters()} for m in self.modules)
        return all(
            (grad is None) == (delayed[name] is None) and (grad is None or torch.equal(grad, delayed[name]))
            for name, grad in ordinary.items()
        )


def stack(bias: bool = True, dtype: torch.dtype = torch.float32, features: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(features, features, bias) for _ in range(3))
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1].to(dtype)


def batch(n: int, rows: int = 32, dtype: torch.dtype = torch.float32, features: int = 64) -> torch.Tensor:
    return (torch.randn(rows, features, generator=torch.Generator().manual_seed(n)) * 2.0**n).to(dtype)


def without_gradient(module: nn.Module) -> list[str]:
    """The names of the trained parameters whose ``.grad`` is None."""
    return [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
