"""DelayedWgrad: when something waits, what is worked off, hooks, main_grad, and what may go wrong in between."""

from __future__ import annotations

import gc

import pytest
import thunder
import torch
from block_model import Model, tokens
from delayed_steps import Pair, batch, stack, without_gradient
from thunder_te_exec import DelayedWgrad, jit_blocks, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from torch import nn


def jitted(module: nn.Module, **options):
    return thunder.jit(module, executors=[te_ex], te_delay_wgrad=True, **options)


def run(function, n: int = 0, dtype: torch.dtype = torch.float32) -> None:
    function(batch(n, dtype=dtype)).sum().backward()


def names_of(module: nn.Module, parameters) -> list[str]:
    of = {id(p): name for name, p in module.named_parameters()}
    return sorted(of[id(p)] for p in parameters)


@pytest.fixture
def module() -> nn.Module:
    return stack()


@pytest.fixture
def function(module):
    return jitted(module)


@pytest.fixture
def wgrads(function) -> DelayedWgrad:
    return DelayedWgrad(function)


def test_nothing_waits_before_a_backward_after_no_grad_and_after_working_off(function, wgrads, module) -> None:
    calls = []
    wgrads.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))

    def nothing_happens() -> bool:
        before = [p.grad for p in module.parameters()]
        wgrads.backward_dw()
        same = all(a is b for a, b in zip(before, (p.grad for p in module.parameters())))
        return same and not wgrads.need_backward_dw() and wgrads.get_backward_dw_params() == []

    assert nothing_happens()
    with torch.no_grad():
        function(batch(0))
    assert nothing_happens()
    function(batch(0))  # a forward alone
    assert nothing_happens() and not calls
    run(function)
    assert wgrads.need_backward_dw() and not calls
    wgrads.backward_dw()
    assert nothing_happens() and calls == [1]


def test_backwards_are_worked_off_in_order_one_by_one(function, wgrads, module) -> None:
    oracle = Pair(stack())
    for n in range(3):
        run(function, n)
    for n in range(3):
        assert wgrads.need_backward_dw()
        run(oracle.ordinary, n)
        wgrads.backward_dw()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), oracle.modules[0].parameters()))
    assert not wgrads.need_backward_dw()


def test_two_calls_in_one_backward_are_one_backward(function, wgrads) -> None:
    (function(batch(0)) + function(batch(1))).sum().backward()
    wgrads.backward_dw()
    assert not wgrads.need_backward_dw()


def test_two_backwards_of_one_forward_wait_twice_with_the_same_bits() -> None:
    pair = Pair(stack(), te_fp8_recipe=DelayedScaling(amax_history_len=2))
    for n in range(2):
        for f in (pair.ordinary, pair.delayed):
            y = f(batch(n)).sum()
            y.backward(retain_graph=True)
            y.backward()
    for _ in range(4):
        assert pair.wgrads.need_backward_dw()
        pair.wgrads.backward_dw()
    assert not pair.wgrads.need_backward_dw() and pair.gradients_are_the_same()


def test_hooks_run_once_each_in_order_when_gradients_are_there(function, wgrads, module) -> None:
    seen = []
    for name in "ab":
        wgrads.register_wgrad_accumulation_and_reduce_hooks(
            lambda name=name: seen.append((name, without_gradient(module)))
        )
    for n in range(2):
        run(function, n)
        wgrads.backward_dw()
        assert seen == [("a", []), ("b", [])] * (n + 1)


def test_a_hook_that_raises_leaves_nothing_waiting_and_the_next_call_works(function, wgrads, module) -> None:
    calls = []

    def fails_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no network")

    wgrads.register_wgrad_accumulation_and_reduce_hooks(fails_once)
    run(function)
    with pytest.raises(OSError, match="no network"):
        wgrads.backward_dw()
    assert not wgrads.need_backward_dw() and without_gradient(module) == []
    run(function)
    wgrads.backward_dw()
    assert calls == [1, 1]


@pytest.mark.parametrize("place", ("before", "behind"))
def test_after_an_exception_in_backward_nothing_waits(function, wgrads, place) -> None:
    def fails(_: torch.Tensor) -> None:
        raise OSError("in backward")

    x = batch(0).requires_grad_()
    y = function(x)
    (y if place == "before" else x).register_hook(fails)
    with pytest.raises(OSError, match="in backward"):
        y.sum().backward()
    assert not wgrads.need_backward_dw() and not wgrads._queue._backwards


def test_after_an_exception_in_backward_dw_what_is_left_is_set_once(module, monkeypatch) -> None:
    from thunder_te_exec.linear import Fp8Linear

    pair, compute, calls = Pair(module), Fp8Linear.wgrad, []

    def fails_second(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("full")
        return compute(self, *args)

    pair.backward(batch(0))
    monkeypatch.setattr(Fp8Linear, "wgrad", fails_second)
    with pytest.raises(torch.OutOfMemoryError):
        pair.wgrads.backward_dw()
    left = without_gradient(pair.modules[1])
    assert len(left) == 4 and names_of(pair.modules[1], pair.wgrads.get_backward_dw_params()) == sorted(left)
    pair.wgrads.backward_dw()
    assert pair.gradients_are_the_same() and not pair.wgrads.need_backward_dw()


def test_a_parameter_that_is_frozen_meanwhile_gets_no_gradient(function, wgrads, module) -> None:
    run(function)
    module[2].weight.requires_grad_(False)
    assert "2.weight" not in names_of(module, wgrads.get_backward_dw_params())
    wgrads.backward_dw()
    assert module[2].weight.grad is None and without_gradient(module) == []


def test_a_model_that_is_freed_meanwhile_is_freed_and_gets_nothing() -> None:
    function = jitted(stack())
    wgrads = DelayedWgrad(function)
    run(function)
    del function
    gc.collect()
    assert wgrads.get_backward_dw_params() == []
    wgrads.backward_dw()
    assert not wgrads.need_backward_dw()


def test_a_submodules_gradients_are_worked_off_alone_and_first_in_first_out() -> None:
    pair = Pair(stack())
    parts = [DelayedWgrad(pair.delayed, name) for name in ("0", "2", "4")]
    calls = []
    parts[1].register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append("2"))
    for n in range(2):
        pair.backward(batch(n))
    assert names_of(pair.modules[1], parts[1].get_backward_dw_params()) == ["2.bias", "2.weight"]
    parts[1].backward_dw()
    assert without_gradient(pair.modules[1]) == ["0.weight", "0.bias", "4.weight", "4.bias"] and calls == ["2"]
    parts[1].backward_dw()
    assert not parts[1].need_backward_dw() and pair.wgrads.need_backward_dw()
    for _ in range(2):
        assert len(pair.wgrads.get_backward_dw_params()) == 4
        pair.wgrads.backward_dw()
    assert pair.gradients_are_the_same() and calls == ["2", "2"]


def test_a_block_of_jit_blocks_is_worked_off_by_its_name_in_the_model() -> None:
    pair = Pair(Model(blocks=2), jit=jit_blocks)
    block = DelayedWgrad(pair.delayed, "layers.1")
    for n in range(2):
        pair.backward(tokens(n))
    assert names_of(pair.modules[1], block.get_backward_dw_params()) == ["layers.1.o.bias", "layers.1.o.weight"]
    block.backward_dw()
    assert {"layers.0.o.weight", "head.weight"} <= set(without_gradient(pair.modules[1]))
    for _ in range(2):
        pair.wgrads.backward_dw()
    assert not pair.wgrads.need_backward_dw() and pair.gradients_are_the_same()


# --- main_grad --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A weight of two modules, and a third linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


@pytest.mark.parametrize("main_dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_gemms_add_to_main_grad_in_place_and_weights_get_no_grad(dtype, main_dtype) -> None:
    recipe = Float8CurrentScaling()  # under which a second step is as the first
    pair = Pair(stack(dtype=dtype), te_fp8_recipe=recipe)
    module = pair.modules[1]
    fused = jitted(module, te_fp8_recipe=recipe, te_fuse_wgrad_accumulation=True)
    wgrads = DelayedWgrad(fused)
    weights = [module[i].weight for i in (0, 2, 4)]
    for w in weights:
        w.main_grad = torch.zeros_like(w, dtype=main_dtype)
    places = [w.main_grad.data_ptr() for w in weights]
    run(pair.ordinary, dtype=dtype)
    run(fused, dtype=dtype)
    biases = [f"{i}.bias" for i in (0, 2, 4)]
    assert names_of(module, wgrads.get_backward_dw_params()) == biases
    wgrads.backward_dw()
    assert without_gradient(module) == [f"{i}.weight" for i in (0, 2, 4)]
    assert [w.main_grad.data_ptr() for w in weights] == places
    for i in (0, 2, 4):
        expected, found = pair.modules[0][i], module[i]
        assert torch.equal(found.bias.grad, expected.bias.grad)
        # The GEMM rounds its float32 sum once, to main_grad's type.
        coarser = torch.bfloat16 if torch.bfloat16 in (dtype, main_dtype) else torch.float32
        assert torch.equal(found.weight.main_grad.to(coarser), expected.weight.grad.to(coarser))
    once = [w.main_grad.clone() for w in weights]
    run(fused, dtype=dtype)
    wgrads.backward_dw()
    for w, first in zip(weights, once):
        torch.testing.assert_close(w.main_grad, 2 * first)


def test_a_tied_weight_adds_all_its_gradients_to_main_grad_in_their_gemms() -> None:
    pair = Pair(Tied())
    module = pair.modules[1]
    module.first.weight.main_grad = torch.zeros(64, 64)
    fused = jitted(module, te_fuse_wgrad_accumulation=True)
    wgrads = DelayedWgrad(fused)
    run(pair.ordinary)
    run(fused)
    wgrads.backward_dw()
    assert without_gradient(module) == ["first.weight"]  # the one that has a main_grad
    torch.testing.assert_close(module.first.weight.main_grad, pair.modules[0].first.weight.grad)
    assert not any("add" in b.sym.name for trace in wgrads.traces() for b in trace.bound_symbols)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * 2.0)


def test_a_gradient_that_no_gemm_ends_in_is_added_to_main_grad_too() -> None:
    pair = Pair(Scaled())
    module = pair.modules[1]
    module.weight.main_grad = torch.ones(64, 64)
    fused = jitted(module, te_fuse_wgrad_accumulation=True)
    wgrads = DelayedWgrad(fused)
    run(pair.ordinary)
    run(fused)
    assert wgrads.get_backward_dw_params() == []
    wgrads.backward_dw()
    assert module.weight.grad is None
    assert torch.equal(module.weight.main_grad, 1 + pair.modules[0].weight.grad)


@pytest.mark.parametrize(
    ("now", "message"),
    (
        (None, r"2\.weight\.main_grad: the function was compiled for a parameter that has one, and it has none now"),
        (torch.zeros(64, 32), r"2\.weight\.main_grad: expected a contiguous float32 or bfloat16 tensor of shape \(64"),
        (torch.zeros(64, 64, dtype=torch.float16), r"2\.weight\.main_grad: expected .*, got torch\.float16"),
    ),
)
def test_a_main_grad_that_does_not_fit_is_named_and_can_be_put_right(module, now, message) -> None:
    module[2].weight.main_grad = torch.zeros(64, 64)
    function = jitted(module, te_fuse_wgrad_accumulation=True)
    wgrads = DelayedWgrad(function)
    run(function)
    module[2].weight.main_grad = now
    with pytest.raises(RuntimeError, match=message):
        wgrads.backward_dw()
    module[2].weight.main_grad = torch.zeros(64, 64)
    wgrads.backward_dw()
    assert module[2].weight.main_grad.any() and without_gradient(module) == ["2.weight"]


def test_a_main_grad_that_comes_after_the_first_call_is_named(module) -> None:
    function = jitted(module, te_fuse_wgrad_accumulation=True)
    run(function)
    module[0].weight.main_grad = torch.zeros(64, 64)
    with pytest.raises(RuntimeError, match=r"0\.weight\.main_grad: the function was compiled for .* none"):
        DelayedWgrad(function).backward_dw()


def test_without_the_option_main_grad_is_not_looked_at(function, wgrads, module) -> None:
    module[0].weight.main_grad = torch.zeros(64, 64)
    run(function)
    wgrads.backward_dw()
    assert not module[0].weight.main_grad.any() and module[0].weight.grad is not None


# --- what it is made from ---------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_said(module) -> None:
    with pytest.raises(TypeError, match="expected what thunder.jit or jit_blocks returned, got Sequential"):
        DelayedWgrad(module)
    with pytest.raises(TypeError, match="expected a jitted module, got"):
        DelayedWgrad(thunder.jit(torch.sin, executors=[te_ex], te_delay_wgrad=True))
    with pytest.raises(ValueError, match="te_delay_wgrad=True"):
        DelayedWgrad(thunder.jit(module, executors=[te_ex]))
    with pytest.raises(AttributeError, match="layers"):
        DelayedWgrad(jitted(module), "layers.0")
    with pytest.raises(ValueError, match="give te_delay_wgrad=True too"):
        thunder.jit(module, executors=[te_ex], te_fuse_wgrad_accumulation=True)(batch(0))
    with pytest.raises(TypeError, match="te_delay_wgrad: expected True or False, got 'yes'"):
        thunder.jit(module, executors=[te_ex], te_delay_wgrad="yes")(batch(0))
