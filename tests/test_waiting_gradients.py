"""Gradients of adapters that wait for a kernel: which do, which do not, and that numbers stay."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
import torch.nn.functional as F
from programs import LoraMLP
from steps import same
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import executor, te_ex
from thunder_te_exec.passes import PASSES, waiting_gradients
from thunder_te_exec.recipe import Float8CurrentScaling
from thunder_te_exec.symbols import is_te_backward
from torch import Tensor, nn
from traces import joint_trace, makes_everything_before_it_is_read, products_in_backward

WITHOUT = tuple(run for run in PASSES if run is not waiting_gradients)


class Adapted(nn.Module):
    """Frozen linears of 96 features, and a trained adapter ``A``, ``B`` of rank 8."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("gate", "up", "mid", "post", "out"):
            setattr(self, name, nn.Linear(96, 96, bias=False).requires_grad_(False))
        self.A, self.B = nn.Linear(96, 8, bias=False), nn.Linear(8, 96, bias=False)
        self.trained = nn.Linear(96, 96, bias=False)
        self.period = nn.Parameter(torch.randn(1, 96))

    def forward(self, x: Tensor) -> Tensor:
        g, u = self.gate(x), self.up(x)
        h = F.silu(g) * u
        return self.out(h) + self.B(self.A(h))


class BesideAKernelThatReadsIt(Adapted):
    """What reads ``g`` besides the activation has its gradient before the linear that the adapter's would wait for."""

    def forward(self, x: Tensor) -> Tensor:
        g = self.gate(x)
        h = F.silu(g) * g
        return self.out(h) + self.B(self.A(h)) + self.post(torch.sin(g))


class FromSmallTensors(Adapted):
    """The activation is computed from a column and a row, and no kernel reads anything of its size."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(x)
        h = torch.tanh(x[:, :1].detach() * self.period.detach())
        return self.out(y) + self.B(self.A(h))


class OneSourceIsReadNoMore(Adapted):
    """The activation is computed from ``u`` too, which only an earlier kernel reads: it would live longer."""

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(x)
        h = F.silu(self.gate(x)) + u
        return self.post(self.out(h) + self.B(self.A(h))) * u


class WithATrainedLinear(Adapted):
    """A trained linear reads ``h`` as well: its gradient reads another tensor of that size."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        return self.out(h) + self.B(self.A(h)) + self.trained(h)


STAY = (BesideAKernelThatReadsIt, FromSmallTensors, OneSourceIsReadNoMore, WithATrainedLinear)


def trace_of(module: nn.Module, passes=PASSES) -> TraceCtx:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(executor, "PASSES", passes)
        x = torch.randn(32, 96).requires_grad_()
        options = {"te_filter": lambda name, shape: name.startswith(("gate", "up", "mid", "post", "out"))}
        return joint_trace(module, x, behind=[torch_compile_ex], **options)[1]


def linears_before_the_gradient_of_a(trace: TraceCtx) -> int:
    """How many FP8 linears have run backward when the gradient of the adapter's first matrix is computed."""
    assert makes_everything_before_it_is_read(trace)
    (at,) = products_in_backward(trace, 8, 96)
    return sum(map(is_te_backward, trace.bound_symbols[:at]))


def test_a_gradient_waits_for_the_kernel_that_reads_what_its_activation_is_computed_from() -> None:
    assert linears_before_the_gradient_of_a(trace_of(Adapted(), WITHOUT)) == 0
    assert linears_before_the_gradient_of_a(trace_of(Adapted())) == 1


@pytest.mark.parametrize("module", STAY)
def test_a_gradient_does_not_wait_where_nothing_is_gained_or_something_large_is_kept(module) -> None:
    there, without = trace_of(module()), trace_of(module(), WITHOUT)
    assert linears_before_the_gradient_of_a(there) == linears_before_the_gradient_of_a(without)


@pytest.mark.parametrize("module", (Adapted, *STAY, LoraMLP))
def test_numbers_are_those_of_gradients_that_do_not_wait(module, monkeypatch) -> None:
    def run(passes) -> list[Tensor]:
        monkeypatch.setattr(executor, "PASSES", passes)
        torch.manual_seed(0)
        trained = module()  # in float32, where nothing is rounded between kernels
        for name, parameter in trained.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "base" not in name)
        compiled = thunder.jit(trained, executors=[te_ex, torch_compile_ex], te_fp8_recipe=Float8CurrentScaling())
        x = torch.randn(32, 64 if module is LoraMLP else 96).requires_grad_()
        y = compiled(x)
        y.sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in trained.parameters() if p.grad is not None)]

    assert same(run(PASSES), run(WITHOUT))
