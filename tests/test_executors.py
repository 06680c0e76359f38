"""te_ex with other executors in the list, under every grad mode, in modules and functions."""

from __future__ import annotations

import pytest
import thunder
import torch
from thunder.executors.sdpaex import sdpa_ex
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import te_ex
from thunder_te_exec.symbols import te_sync_fp8_meta_bwd
from torch import nn
from traces import backward_linears, flags, forward_linears


class Block(nn.Module):
    """Attention and an MLP, small: pointwise code around linears that other executors fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, c // 2).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(nn.functional.silu(self.up(x)))


LISTS = {
    "alone": lambda: [te_ex],
    "in front of the default": lambda: [te_ex, *thunder.get_default_executors()],
    "in front of a compiler": lambda: [te_ex, sdpa_ex, torch_compile_ex],
    "behind an executor of attention": lambda: [sdpa_ex, te_ex],
    "by name": lambda: ["thunder_te"],
}


def block(frozen: bool = True) -> Block:
    torch.manual_seed(0)
    module = Block()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(("qkv", "up"))))
    return module


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return run([te_ex])


def run(executors: list) -> dict[str, torch.Tensor]:
    module = block()
    compiled = thunder.jit(module, executors=executors)
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = compiled(x)
    y.pow(2).sum().backward()
    assert [b.sym.name for b in forward_linears(compiled)] == [f"te_linear_{n}" for n in range(4)]
    expected = [(True, False, False), (True, True, True)] * 2
    assert flags(forward_linears(compiled)) == expected and flags(backward_linears(compiled)) == expected[::-1]
    *_, sync, _ = thunder.last_backward_traces(compiled)[-1].bound_symbols
    assert sync.sym == te_sync_fp8_meta_bwd
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None} | {"y": y.detach(), "x": x.grad}
    with torch.no_grad():
        compiled(x)
    assert len(forward_linears(compiled)) == 4
    return found


@pytest.mark.parametrize("executors", LISTS)
def test_linears_are_claimed_and_pruned_whatever_else_is_in_the_list(executors, alone) -> None:
    found = run(LISTS[executors]())
    assert found.keys() == alone.keys()
    for name, value in found.items():
        # Fused pointwise code rounds differently: one FP8 number in 1000 may fall to its neighbour, 2**-2 of it away.
        error = (value - alone[name]).norm() / alone[name].norm()
        assert error < 2.0**-2 * 1000**-0.5, f"{name}: {error:.3g}"


def test_everything_frozen_is_claimed_with_and_without_a_gradient_for_the_input() -> None:
    module = block()
    module.requires_grad_(False)
    compiled = thunder.jit(module, executors=[te_ex])
    x = torch.randn(2, 16, 64)
    compiled(x)
    assert flags(forward_linears(compiled)) == [(False, False, False)] * 4
    compiled(x.requires_grad_()).sum().backward()
    assert flags(forward_linears(compiled)) == [(True, False, False)] * 4
    assert x.grad.shape == x.shape


def test_a_region_without_gradients_inside_a_trained_module_is_claimed() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            with torch.no_grad():
                h = self.frozen(x)
            return self.trained(h)

    module = Outer()
    compiled = thunder.jit(module, executors=[te_ex])
    compiled(torch.randn(16, 32)).sum().backward()
    assert flags(forward_linears(compiled)) == [(False, False, False), (False, True, True)]
    assert module.frozen.weight.grad is None and module.trained.weight.grad is not None


def test_a_function_of_linears_trains() -> None:
    def f(x, w1, w2):
        return nn.functional.linear(torch.relu(nn.functional.linear(x, w1)), w2)

    x, w1, w2 = torch.randn(16, 32), torch.randn(64, 32, requires_grad=True), torch.randn(32, 64)
    compiled = thunder.jit(f, executors=[te_ex])
    compiled(x, w1, w2).sum().backward()
    assert flags(forward_linears(compiled)) == [(False, True, False), (True, False, False)]
    assert w1.grad.shape == w1.shape


@pytest.mark.parametrize("claimed", (True, False), ids=("claimed", "not claimed"))
def test_what_is_detached_and_written_to_in_place_alone_is_no_differentiable_output(claimed) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            h = self.linear(x).detach()
            h.mul_(0.5)
            return h

    module, head = Features(), nn.Linear(32, 1)
    compiled = thunder.jit(module, executors=[te_ex], te_filter=lambda name, shape: claimed)
    head(compiled(torch.randn(16, 32))).sum().backward()
    assert module.linear.weight.grad is None and head.weight.grad is not None


def test_a_gradient_that_a_users_function_makes_of_nothing_is_kept() -> None:
    class Constant(torch.autograd.Function):
        """A backward that ignores the gradient it gets, as of a loss that is always the last thing."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return x * 2.0

    def f(x, w, v):
        return Constant.apply(nn.functional.linear(x, w)) + nn.functional.linear(x, v).sum()

    x, w, v = torch.randn(16, 32), torch.randn(32, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    compiled = thunder.jit(f, executors=[te_ex], te_filter=lambda name, shape: False)
    found = torch.autograd.grad(compiled(x, w, v), (w, v))
    for ours, eager in zip(found, torch.autograd.grad(f(x, w, v), (w, v))):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("kind", ("copied to", "added to", "a number added", "an element set"))
def test_zeros_that_a_users_backward_starts_from_are_not_taken_for_its_result(kind) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            z = torch.zeros(16, 32)
            if kind == "copied to":
                z.copy_(g)
                return z
            if kind == "added to":
                return z + g
            if kind == "a number added":
                return (z + 1.0) * g
            z[0] = g[0]
            return z

    def f(x, w):
        return Double.apply(nn.functional.linear(x, w)).sum()

    x, w = torch.randn(16, 32), torch.randn(32, 32, requires_grad=True)
    compiled = thunder.jit(f, executors=[te_ex], te_filter=lambda name, shape: False)
    (found,) = torch.autograd.grad(compiled(x, w), (w,))
    torch.testing.assert_close(found, *torch.autograd.grad(f(x, w), (w,)))


def test_a_trace_without_a_linear_is_left_alone() -> None:
    compiled = thunder.jit(lambda x: torch.relu(x) + 1, executors=[te_ex])
    x = torch.randn(4, 4, requires_grad=True)
    assert torch.equal(compiled(x), torch.relu(x) + 1)
    assert "transformer_engine" not in str(thunder.last_traces(compiled)[-1])
