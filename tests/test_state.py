"""FP8 state: who owns it, when it moves."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import thunder
import torch
from oracle import oracle_linear
from steps import batch, same
from thunder_te_exec import claims, fp8_state_dict, load_fp8_state_dict, te_ex
from thunder_te_exec.recipe import DelayedScaling
from torch import nn

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


def test_scales_move_in_training_and_rest_without_gradients() -> None:
    linear = nn.Linear(32, 32, bias=False)
    recipe = DelayedScaling(amax_history_len=2)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe)
    oracle = oracle_linear(recipe)
    for step in range(3):
        x = X * 5.0 ** (step + 1)
        with torch.no_grad():
            once, again = compiled(x), compiled(x)
        assert torch.equal(once, again)
        y = compiled(x)
        assert torch.equal(y, once)  # the scales of training serve inference too
        expected = oracle(x, linear.weight.detach(), None)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        oracle.end_of_forward()


def test_state_survives_another_shape_and_another_frozen_pattern() -> None:
    linear = nn.Linear(32, 32, bias=False)
    recipe = DelayedScaling(amax_history_len=8)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe)
    oracle = oracle_linear(recipe)
    for step, rows in enumerate((16, 32, 16, 48)):
        linear.weight.requires_grad_(step % 2 == 0)
        x = (X.repeat(3, 1)[:rows] * 7.0**step).requires_grad_()
        expected = oracle(x.detach(), linear.weight.detach(), None)
        oracle.end_of_forward()
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert len(thunder.compile_stats(compiled).interpreter_cache) > 2


def test_two_uses_of_a_weight_have_state_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, bias=False)

        def forward(self, x):
            return self.linear(x), self.linear(x * 100)

    module = Twice()
    recipe = DelayedScaling(amax_history_len=1)
    compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe)
    oracles = [oracle_linear(recipe), oracle_linear(recipe)]
    for _ in range(3):
        for y, oracle, x in zip(compiled(X), oracles, (X, X * 100)):
            torch.testing.assert_close(y, oracle(x, module.linear.weight.detach(), None), rtol=1e-5, atol=1e-4)
            oracle.end_of_forward()


def test_a_computed_weight_keeps_its_state_in_another_trace() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(32, 32)), nn.Parameter(torch.ones(32, 32))

        def forward(self, x):
            return nn.functional.linear(x, self.a * 2) + nn.functional.linear(x, self.b * 1000)

    recipe = DelayedScaling(amax_history_len=1)
    compiled = thunder.jit(Scaled(), executors=[te_ex], te_fp8_recipe=recipe)
    for _ in range(2):
        y = compiled(X)
    with torch.no_grad():
        assert torch.equal(compiled(X), y)


@pytest.mark.parametrize("shared", (False, True), ids=("computed weights", "one weight twice"))
def test_state_stays_with_its_linear_when_a_linear_before_it_is_not_claimed(shared) -> None:
    class Pooled(nn.Module):
        """A linear on a few rows before two that keep state."""

        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.Linear(32, 32, bias=False)
            self.w = nn.Parameter(torch.ones(32, 32) / 32)

        def forward(self, x, few):
            pooled = nn.functional.linear(few, self.w) if shared else self.pool(few)
            y = nn.functional.linear(x, self.w if shared else self.w * 2)
            return y + nn.functional.linear(x, self.w * 1000) + pooled.sum()

    compiled = thunder.jit(Pooled(), executors=[te_ex], te_fp8_recipe=DelayedScaling(amax_history_len=1))
    few = torch.zeros(16, 32)
    for _ in range(2):
        y = compiled(X, few)
    with torch.no_grad():
        assert torch.equal(compiled(X, few), y)
        assert torch.equal(compiled(X, few[:8]), y)  # 8 rows are not claimed


def test_what_is_seen_without_gradients_counts_in_the_next_update_as_in_transformer_engine() -> None:
    linear = nn.Linear(32, 32, bias=False)
    recipe = DelayedScaling(amax_history_len=1)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe)
    oracle = oracle_linear(recipe)
    for x, grad in ((X, True), (X * 50, False), (X, True), (X, True)):
        with torch.set_grad_enabled(grad):
            y = compiled(x)
        torch.testing.assert_close(y, oracle(x, linear.weight.detach(), None), rtol=1e-5, atol=1e-4)
        if grad:
            oracle.end_of_forward()


def test_two_jitted_functions_of_one_module_have_state_of_their_own() -> None:
    linear = nn.Linear(32, 32, bias=False)
    one, other = (thunder.jit(linear, executors=[te_ex]) for _ in range(2))
    fresh = other(X).detach()
    for _ in range(3):
        one(X * 50)
    third = thunder.jit(linear, executors=[te_ex])
    assert torch.equal(third(X), fresh)


def test_a_jitted_module_is_collected_with_its_state() -> None:
    compiled = thunder.jit(nn.Linear(32, 32), executors=[te_ex])
    compiled(X).sum().backward()
    state = weakref.ref(vars(thunder.compile_data(compiled))["thunder_te_exec"])
    assert state() is not None
    del compiled
    gc.collect()
    assert state() is None


@pytest.mark.parametrize("recipe_is_default", (True, False))
def test_a_first_call_in_inference_mode_leaves_a_function_that_trains(recipe_is_default) -> None:
    linear = nn.Linear(32, 32)
    options = {} if recipe_is_default else {"te_weight_cache": True}
    compiled, fresh = (thunder.jit(linear, executors=[te_ex], **options) for _ in range(2))
    with torch.inference_mode():
        compiled(X)
    for x in (X, X * 3):
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(y, fresh(x))
        with torch.no_grad():
            compiled(x)


def test_an_error_in_forward_leaves_a_jitted_module_usable() -> None:
    linear = nn.Linear(32, 32)
    compiled = thunder.jit(linear, executors=[te_ex])
    compiled(X)
    with pytest.raises(RuntimeError):
        compiled(torch.randn(16, 31))
    fresh = thunder.jit(linear, executors=[te_ex])
    fresh(X)
    assert torch.equal(compiled(X), fresh(X))


@pytest.mark.parametrize("called_before", (False, True))
def test_a_deep_copy_goes_on_with_the_same_bits_and_shares_nothing(called_before) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    module[0].requires_grad_(False)
    recipe = DelayedScaling(amax_history_len=3)
    function = thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe, te_filter=lambda name, shape: "0" in name)
    for n in range(3 * called_before):
        outputs_and_gradients(function, batch(n))
    twin = copy.deepcopy(function)
    before = fp8_state_dict(function)
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in module.parameters()]
    assert same_entries(fp8_state_dict(twin), before)
    found = [y for n in (3, 4) for y in outputs_and_gradients(twin, batch(n))]
    assert same_entries(fp8_state_dict(function), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    assert same(found, [y for n in (3, 4) for y in outputs_and_gradients(function, batch(n))])
    assert {c.weight: c.claimed for c in claims(twin)} == {"0.weight": True, "1.weight": False}


def same_entries(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def outputs_and_gradients(function, x: torch.Tensor) -> list[torch.Tensor]:
    trained = [p for p in function.parameters() if p.requires_grad]
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), trained)]


def test_a_deep_copy_keeps_hooks_attributes_and_what_a_strict_load_promised() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    recipe = DelayedScaling(amax_history_len=3)
    function = thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe)
    function(batch(0)).sum().backward()
    some = {name: t for name, t in fp8_state_dict(function).items() if not name.startswith("1.")}
    other = thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe)
    load_fp8_state_dict(other, some)
    with pytest.raises(ValueError, match="missing: 1.grad_output"):
        copy.deepcopy(other)(batch(0))
    function.register_forward_hook(lambda module, args, y: y * 2.0)
    function.note = ["kept"]
    twin = copy.deepcopy(function)
    assert torch.equal(twin(batch(1)), function(batch(1))) and twin.note == ["kept"] and twin.note is not function.note
    recipe.margin = 3
    for called, entries in ((function, 2), (twin, 1)):
        called(batch(1))
        assert len(thunder.compile_stats(called).interpreter_cache) == entries


def test_a_deep_copy_of_a_function_with_transforms_says_what_to_do() -> None:
    class Nothing(thunder.Transform):
        pass

    function = thunder.jit(nn.Linear(32, 32), executors=[te_ex], transforms=[Nothing()])
    with pytest.raises(
        NotImplementedError, match=r"transforms \(Nothing\): copy the original module, and jit the copy"
    ):
        copy.deepcopy(function)
