"""Linears with adapters that all read one tensor, of whole numbers, which eager torch computes exactly."""

from __future__ import annotations

from collections.abc import Callable

import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from recipes import powers_of_two
from thunder.core.symbol import BoundSymbolTag
from thunder_te_exec import te_ex
from thunder_te_exec.passes.patterns import symbol_ids
from torch import nn
from traces import joint_trace

ROWS, FEATURES = 32, 64
SPLITS = symbol_ids("split")


class Adapted(nn.Module):
    """The sum of linears and of their adapters, all of one tensor; every number is whole."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in ranks)
        self.A = nn.ModuleList(nn.Linear(FEATURES, rank, bias=False) for rank in ranks)
        self.B = nn.ModuleList(nn.Linear(rank, FEATURES, bias=False) for rank in ranks)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).float()
        self.base.requires_grad_(False)

    def low(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return self.A[i](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(base(x) + self.B[i](self.low(i, x)) for i, base in enumerate(self.base))


def adapted(*ranks: int, low: Callable | None = None, frozen: str = "") -> Adapted:
    """``low(self, i, x)`` is what adapter ``i`` computes first; names of frozen parameters begin with ``frozen``."""
    module = Adapted(*ranks)
    if low is not None:
        module.low = low.__get__(module)
    for name, parameter in module.named_parameters():
        if frozen and name.startswith(frozen):
            parameter.requires_grad_(False)
    return module


def whole_input(requires_grad: bool = True, rows: int = ROWS) -> torch.Tensor:
    x = torch.randint(-2, 3, (2, rows // 2, FEATURES), generator=torch.Generator().manual_seed(1)).float()
    return x.requires_grad_(requires_grad)


def merged(module: nn.Module, x: torch.Tensor, **options) -> tuple[list[list[int]], list[list[int]]]:
    """The sizes that merged products are split into, in forward and in backward."""
    _, after = joint_trace(module, x, te_fp8_recipe=powers_of_two(), **options)
    splits = [b for b in after.bound_symbols if b.sym.id in SPLITS]
    backward = [BoundSymbolTag.BACKWARD in b.tags for b in splits]
    return tuple([list(b.args[1]) for b, late in zip(splits, backward) if late is which] for which in (False, True))


def gives_the_numbers_of_eager_torch(module: nn.Module, x: torch.Tensor, executors: tuple = ()) -> None:
    found = []
    for run in (thunder.jit(module, executors=[te_ex, *executors], te_fp8_recipe=powers_of_two()), module):
        module.zero_grad()
        x.grad = None
        y = run(x)
        g = torch.randint(-2, 3, y.shape, generator=torch.Generator().manual_seed(2)).float()
        for _ in range(2):  # the second is added to the first
            y.backward(g, retain_graph=True)
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        found.append({"y": y.detach(), **grads} | ({"x": x.grad} if x.requires_grad else {}))
    ours, eager = found
    assert ours.keys() == eager.keys()
    for name, expected in eager.items():
        assert torch.equal(expected, expected.round()) and expected.abs().max() < 2**24
        assert torch.equal(ours[name], expected), name
