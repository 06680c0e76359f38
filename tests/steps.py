"""Running steps of a jitted function, and comparing what they gave bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from thunder_te_exec import te_ex
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


def under_thunderfx(module: nn.Module, recipe: Any) -> tuple[list[torch.Tensor], list[str]]:
    """What three steps of ``thunderfx(module)`` gave, and the names of the symbols of its backward."""
    from thunder.dynamo import thunderfx

    torch._dynamo.reset()
    function = thunderfx(module, executors=[te_ex], te_fp8_recipe=recipe)
    weight = next(module.parameters())
    found = [t for n in range(3) for t in step(function, module, batch(n).to(weight.device, weight.dtype))]
    (compiled,) = (fn for info in function._backend.subgraph_infos for fn in info.thunder_compiled_fns)
    return found, [b.sym.name for b in thunder.last_backward_traces(compiled)[-1].bound_symbols]
