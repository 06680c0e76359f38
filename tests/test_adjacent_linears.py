"""Linears that read one tensor run one behind the other: what moves, what does not, and that numbers stay."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
import torch.nn.functional as F
from programs import lora_mlp_in_bfloat16
from steps import same
from thunder.core.symbol import BoundSymbolTag
from thunder.executors.sdpaex import sdpa_ex
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import executor, te_ex
from thunder_te_exec.passes import PASSES, adjacent_linears
from thunder_te_exec.passes.adjacent_linears import MOST
from thunder_te_exec.recipe import Float8CurrentScaling
from thunder_te_exec.symbols import is_te_linear, is_te_quantize, is_te_recompute
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from traces import joint_trace, makes_everything_before_it_is_read

WITHOUT = tuple(run for run in PASSES if run is not adjacent_linears)


class Gated(nn.Module):
    """Two linears of one tensor, with ``between`` computed from the first one's output before the second runs."""

    def __init__(self, between) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        gated = self.between(self.gate(h))
        return gated * self.up(h)


def frozen(module: nn.Module) -> nn.Module:
    return module.bfloat16().requires_grad_(False)


def an_input() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()


def stand_together(module: nn.Module, behind=(torch_compile_ex,), of=is_te_linear) -> bool:
    """Whether nothing stands between the first linear of ``module`` and the second."""
    _, after = joint_trace(module, an_input(), behind=list(behind))
    first, second = [i for i, b in enumerate(after.bound_symbols) if of(b)][:2]
    return second == first + 1


def test_what_reads_the_first_linear_comes_behind_the_second() -> None:
    assert stand_together(frozen(Gated(F.silu)))


def test_nothing_moves_where_torch_runs_each_operation() -> None:
    assert not stand_together(frozen(Gated(F.silu)), behind=())


def test_nothing_moves_past_random_numbers() -> None:
    # A second mask would be drawn before the first.
    assert not stand_together(frozen(Gated(lambda y: F.dropout(y, 0.5))))


def test_nothing_moves_past_what_another_executor_runs() -> None:
    def attended(y: Tensor) -> Tensor:
        heads = y.reshape(1, 4, 8, 64)
        return F.scaled_dot_product_attention(heads, heads, heads).reshape(32, 64)

    # On a CPU sdpa_ex claims no attention: an executor that does stands for it.
    claims_all = thunder.extend.OperatorExecutor("claims_attention", version=0)
    like = thunder.torch.scaled_dot_product_attention
    symbol = claims_all.register_operator("attention", like=like, fn=F.scaled_dot_product_attention)
    claims_all.register_implementation(like, symbol)
    module = frozen(Gated(attended))
    with torch.no_grad():
        assert not stand_together(module, behind=(claims_all, torch_compile_ex))
        assert stand_together(module, behind=(sdpa_ex, torch_compile_ex))


class Heads(nn.Module):
    """Of what each linear gives little is left when the next one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        return sum(head(h).float().square().sum(-1) for head in self.heads)


def test_linears_do_not_come_together_where_their_outputs_would_be_kept_for_it() -> None:
    with torch.no_grad():
        assert not stand_together(frozen(Heads()))


class ManyHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(MOST + 3))

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        return torch.cat([head(h) * 2 for head in self.heads], 1)


def test_no_more_than_so_many_linears_come_together() -> None:
    with torch.no_grad():
        _, after = joint_trace(frozen(ManyHeads()), an_input(), behind=[torch_compile_ex])
    linears = [is_te_linear(b) for b in after.bound_symbols]
    assert sum(linears) == MOST + 3
    first = linears.index(True)
    assert all(linears[first : first + MOST]) and not linears[first + MOST]


class Chained(nn.Module):
    """The second linear of a tensor accumulates into a product of what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.a, self.b = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        y = torch.sin(self.first(h))
        return self.second(h) + self.b(self.a(y))


def test_a_linear_that_needs_what_the_first_gives_stays_behind_it() -> None:
    assert not stand_together(frozen(Chained()))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.region, self.last = Gated(F.silu), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.region, x, use_reentrant=False))


def test_so_do_those_that_a_checkpoint_runs_again_in_backward() -> None:
    assert stand_together(frozen(Checkpointed()), of=is_te_recompute)


class ForwardEndsWhereBackwardBegins(nn.Module):
    """Forward's last linear and the one that backward runs again first read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: torch.sin(self.region(t)), x, use_reentrant=False)
        return y * self.last(x)


def test_a_linear_of_backward_does_not_come_to_one_of_forward() -> None:
    module, options = frozen(ForwardEndsWhereBackwardBegins()), {"te_fp8_recipe": Float8CurrentScaling()}
    _, after = joint_trace(module, an_input(), behind=[torch_compile_ex], **options)
    assert sum(map(is_te_recompute, after.bound_symbols)) == 1
    last = max(i for i, b in enumerate(after.bound_symbols) if is_te_linear(b))
    again = next(i for i, b in enumerate(after.bound_symbols) if is_te_recompute(b))
    assert BoundSymbolTag.BACKWARD in after.bound_symbols[again].tags and again > last + 1


def test_the_order_is_one_that_computes_everything_before_it_is_read() -> None:
    _, after = joint_trace(*lora_mlp_in_bfloat16(), behind=[torch_compile_ex])
    assert makes_everything_before_it_is_read(after)
    gate, up, _ = [i for i, b in enumerate(after.bound_symbols) if is_te_linear(b)]
    assert up == gate + 1 and is_te_quantize(after.bound_symbols[gate - 1])


@pytest.mark.parametrize("module", (lambda: Gated(F.silu), Chained, Checkpointed, lambda: lora_mlp_in_bfloat16()[0]))
def test_outputs_and_gradients_are_those_without_the_pass(module, monkeypatch) -> None:
    # In bfloat16 a fuser rounds between its kernels and not inside of one; here nothing is rounded in between.
    def run(passes) -> list[Tensor]:
        monkeypatch.setattr(executor, "PASSES", passes)
        torch.manual_seed(0)
        trained = module().float()
        compiled = thunder.jit(trained, executors=[te_ex, torch_compile_ex], te_fp8_recipe=Float8CurrentScaling())
        x = an_input().detach().float().requires_grad_()
        y = compiled(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, *(p.grad for p in trained.parameters() if p.grad is not None)]

    assert same(run(PASSES), run(WITHOUT))
