"""A model whose quantizations a fuser's kernels take over, and steps of it with and without that."""

from __future__ import annotations

import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import executor, fp8_state_dict, te_ex
from thunder_te_exec.passes import PASSES, fused_quantizations
from thunder_te_exec.recipe import DelayedScaling
from torch import nn

WITHOUT = tuple(run for run in PASSES if run is not fused_quantizations)


class Gated(nn.Module):
    """Frozen linears between pointwise code: one result is read by two of them, one by one.

    Every operation is rounded once: how a fuser orders them and what it contracts changes no bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = 2 * x
        return x + 2 * self.down(self.gate(h) * self.up(h))


def gated(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Gated().requires_grad_(False).to(dtype)


def inputs(
    step: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(step)
    x, g = torch.randn(2, 2, 16, 32)
    return (x * 3**step).to(device, dtype).requires_grad_(), g.to(device, dtype)


def jitted(module: nn.Module, monkeypatch, passes=PASSES, recipe=None):
    monkeypatch.setattr(executor, "PASSES", passes)
    return thunder.jit(module, executors=[te_ex, torch_compile_ex], te_fp8_recipe=recipe or DelayedScaling())


def trained(compiled, dtype: torch.dtype = torch.bfloat16, steps: int = 4) -> list[torch.Tensor]:
    """Outputs, gradients, and then scales and histories."""
    found = []
    for step in range(steps):
        x, g = inputs(step, dtype, next(compiled.parameters()).device)
        y = compiled(x)
        y.backward(g)
        found += [y.detach(), x.grad]
    return [*found, *fp8_state_dict(compiled).values()]


def given_special_numbers(compiled) -> list[torch.Tensor]:
    """Outputs, gradients and states of steps in which some inputs and gradients are NaN, infinite, tiny or zero."""
    found = []
    for value in (float("nan"), float("inf"), -float("inf"), 1e-40, 0.0):
        x, g = inputs(0, device=next(compiled.parameters()).device)
        with torch.no_grad():
            x[1, 3, :5] = g[1, 7] = value
        y = compiled(x)
        y.backward(g)
        found += [y.detach(), x.grad, *(t.clone() for t in fp8_state_dict(compiled).values())]
    return [t.nan_to_num(7.5) if t.is_floating_point() else t for t in found]
