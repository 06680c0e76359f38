"""A small model of repeated blocks with adapters, its jitting and its training."""

from __future__ import annotations

from collections.abc import Callable

import thunder_te_exec  # noqa: F401  (before thunder)
import torch
from recipes import RECIPES, float8_blocks
from thunder_te_exec import te_ex
from torch import nn
from torch.utils.checkpoint import checkpoint

SOME_RECIPES = {name: RECIPES[name] for name in ("delayed", "current")} | {"blocks": float8_blocks}


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter."""

    def __init__(self, out_features: int = 32) -> None:
        super().__init__()
        self.base = nn.Linear(32, out_features, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(32, 8, bias=False), nn.Linear(8, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * 2.0


class Block(nn.Module):
    """A gated block with a norm and a residual connection, and what hostile cases change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.q, self.k = Adapted(), Adapted()
        self.o = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.0)
        self.factor, self.option, self.act = 1.0, None, torch.sigmoid
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = self.act(self.q(h)) * self.k(h) * self.factor + self.shift
        if self.option is not None:
            h = h * 2.0
        return x + self.dropout(self.o(h))


class Model(nn.Module):
    """Token numbers (2, 16) to logits (2, 16, 32); ``reentrant`` checkpoints each block, where it is no None."""

    def __init__(self, blocks: int = 2, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(32, 32), nn.RMSNorm(32), nn.Linear(32, 32, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        for i, layer in enumerate(self.layers):
            layer.shift += i
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(step))


def jitted_by(jit: Callable, recipe: str = "delayed", model: nn.Module | None = None, **options) -> nn.Module:
    return jit(model or Model(), executors=[te_ex], te_fp8_recipe=SOME_RECIPES[recipe](), **options)


def train(model: nn.Module, steps: int = 4, before: Callable[[nn.Module, int], None] = lambda model, step: None):
    """Outputs and gradients of optimizer steps; ``before`` is called before each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(steps):
        before(model, step)
        y = model(tokens(step))
        (y * (step + 1)).square().mean().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found
