"""Delayed weight gradients where autograd would do something of its own: layouts, other modules, writes, exceptions."""

from __future__ import annotations

import threading

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from delayed_steps import Pair, batch
from thunder_te_exec import DelayedWgrad, jit_blocks, te_ex, wgrad_queue
from thunder_te_exec.recipe import Float8CurrentScaling
from torch import nn
from torch.nn import functional as F


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w.t())


def test_a_gradient_has_the_strides_of_its_parameter_as_a_fused_optimizer_expects() -> None:
    both = Pair(Transposed())
    both.backward(batch(0))
    both.wgrads.backward_dw()
    assert both.gradients_are_the_same()
    assert [m.w.grad.stride() for m in both.modules] == [(64, 1)] * 2
    for module in both.modules:
        torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()
    assert torch.equal(*(m.w for m in both.modules))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("also_its_own", (False, True))
def test_a_module_that_is_closed_over_gets_its_gradient_in_backward_whatever_its_names_are(also_its_own) -> None:
    other = Inner()

    class Outer(Inner):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(other(x)) if also_its_own else other(x)

    outer = Outer()
    function = thunder.jit(outer, executors=[te_ex], te_delay_wgrad=True)
    wgrads = DelayedWgrad(function)
    function(batch(0)).sum().backward()
    assert other.linear.weight.grad is not None and outer.linear.weight.grad is None
    waiting = wgrads.get_backward_dw_params()
    assert {id(p) for p in waiting} == ({id(p) for p in outer.parameters()} if also_its_own else set())
    wgrads.backward_dw()
    assert (outer.linear.weight.grad is not None) is also_its_own


class Gated(nn.Module):
    """Its weight is computed from a parameter, an argument and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w * gate * self.mask)


@pytest.mark.parametrize("what", ("gate", "mask", "input"))
def test_a_write_before_backward_dw_to_what_a_gradient_is_computed_from_raises_and_names_it(what) -> None:
    module, x, gate = Gated(), batch(0), torch.rand(64, 1)
    function = thunder.jit(module, executors=[te_ex], te_delay_wgrad=True)
    function(x, gate).sum().backward()
    {"gate": gate, "mask": module.mask, "input": x}[what].mul_(2)
    wgrads = DelayedWgrad(function)
    if what == "input":  # of which there is an FP8 copy
        wgrads.backward_dw()
        assert module.w.grad is not None
        return
    with pytest.raises(RuntimeError, match="delayed gradients of w: .* was written to in place since backward"):
        wgrads.backward_dw()
    assert module.w.grad is None


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.a + self.b)


def test_an_exception_between_two_gradients_of_one_program_doubles_and_loses_none(monkeypatch) -> None:
    both = Pair(Sum())
    for n in range(2):
        both.backward(batch(n))
    both.wgrads.backward_dw()
    add, added = wgrad_queue._add, []

    def fails_at_the_second(*args, **kwargs) -> None:
        if added:
            raise MemoryError
        added.append(add(*args, **kwargs))

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(wgrad_queue, "_add", fails_at_the_second)
        both.wgrads.backward_dw()
    assert both.wgrads.get_backward_dw_params() == [both.modules[1].b]
    both.wgrads.backward_dw()
    assert both.gradients_are_the_same() and not both.wgrads.need_backward_dw()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.relu(F.linear(x, self.w)), self.w)


def test_an_exception_between_two_gemms_that_add_to_one_main_grad_leaves_it_as_it_was(monkeypatch) -> None:
    module = Tied()
    module.w.main_grad = torch.full((64, 64), 2.0)
    options = {"te_delay_wgrad": True, "te_fuse_wgrad_accumulation": True}
    function = thunder.jit(module, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling(), **options)
    wgrads = DelayedWgrad(function)
    function(batch(0)).sum().backward()
    wgrads.backward_dw()
    once = module.w.main_grad - 2.0
    function(batch(0)).sum().backward()
    gemms = []
    linear = thunder_te_exec.linear.Fp8Linear
    wgrad = linear.wgrad

    def fails_at_the_second(self, *args):
        if gemms:
            raise MemoryError
        gemms.append(wgrad(self, *args))

    before = module.w.main_grad.clone()
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(linear, "wgrad", fails_at_the_second)
        wgrads.backward_dw()
    assert torch.equal(module.w.main_grad, before)
    wgrads.backward_dw()
    # The same gradient again: three float32 sums of numbers up to that of the result.
    largest = (before + once).abs().max().item()
    torch.testing.assert_close(module.w.main_grad, before + once, rtol=0, atol=3 * 2**-23 * largest)
    assert not wgrads.need_backward_dw()


def test_threads_that_work_off_one_queue_add_each_gradient_once() -> None:
    both = Pair(nn.Sequential(nn.Linear(64, 64)))
    for n in range(8):
        both.backward(batch(n))
    threads = [threading.Thread(target=lambda: [both.wgrads.backward_dw() for _ in range(4)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert both.gradients_are_the_same() and not both.wgrads.need_backward_dw()


def test_gradients_that_inference_mode_worked_off_can_be_added_to() -> None:
    both = Pair(nn.Sequential(nn.Linear(64, 64)))
    for n in range(2):
        both.backward(batch(n))
    with torch.inference_mode():
        both.wgrads.backward_dw()
    both.wgrads.backward_dw()
    assert both.gradients_are_the_same()


class TiedHead(nn.Module):
    """An embedding whose weight is the head's, and blocks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = torch.relu(block(h))
        return self.head(h)


@pytest.mark.parametrize("main_grad", (False, True))
def test_a_weight_that_is_tied_beyond_what_is_compiled_together_is_not_delayed(main_grad) -> None:
    options = {"te_fuse_wgrad_accumulation": True} if main_grad else {}
    torch.manual_seed(0)
    ordinary, delayed = TiedHead(), TiedHead()
    delayed.load_state_dict(ordinary.state_dict())
    if main_grad:
        for p in delayed.parameters():
            p.main_grad = torch.zeros_like(p)
    functions = [
        jit_blocks(ordinary, executors=[te_ex]),
        jit_blocks(delayed, executors=[te_ex], te_delay_wgrad=True, **options),
    ]
    wgrads = DelayedWgrad(functions[1])
    for n in range(3):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(n))
        for function in functions:
            y = function(tokens)
            y.backward(torch.ones_like(y))
        assert torch.equal(ordinary.embedding.weight.grad, delayed.embedding.weight.grad)
        waiting = wgrads.get_backward_dw_params()
        assert len(waiting) == (2 if main_grad else 4)  # of the blocks: biases, and weights without a main_grad
        assert all(p is not delayed.embedding.weight for p in waiting)
        wgrads.backward_dw()
    if main_grad:
        assert not delayed.embedding.weight.main_grad.any()
    else:
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ordinary.parameters(), delayed.parameters()))


def test_what_would_delay_nothing_is_said() -> None:
    with pytest.raises(TypeError, match="te_delay_wgrad: expected True or False, got 1"):
        thunder.jit(Inner(), executors=[te_ex], te_delay_wgrad=1)(batch(0))
    with pytest.raises(ValueError, match=r"executors=\[te_ex"):
        DelayedWgrad(thunder.jit(Inner(), te_delay_wgrad=True))
    function = thunder.jit(Inner(), executors=[te_ex], te_delay_wgrad=True)
    with pytest.raises(TypeError, match="expected the name of a submodule, got Linear"):
        DelayedWgrad(function, function.linear)
    with pytest.raises(TypeError, match="expected a function, got 3"):
        DelayedWgrad(function).register_wgrad_accumulation_and_reduce_hooks(3)


def test_a_weight_that_is_frozen_meanwhile_gets_no_main_grad_and_one_that_is_computed_with_it_does() -> None:
    class Program:
        """Of two weights, with a GEMM for each."""

        slots = tuple(wgrad_queue.WgradSlot(name, True, fresh=True) for name in "ab")
        adds_several_times = True

        @staticmethod
        def run(*main_grads: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
            for main_grad in main_grads:
                if main_grad is not None:
                    main_grad.add_(1)
            return dict.fromkeys("ab")

    a, b = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    for p in (a, b):
        p.main_grad = torch.zeros_like(p)
    waiting = wgrad_queue.Waiting(Program, ("a", "b"), (lambda: a, lambda: b), ())
    b.requires_grad_(False)
    waiting.work_off()
    assert bool((a.main_grad == 1).all()) and not b.main_grad.any()
