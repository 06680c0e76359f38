"""FP8 state: who owns it, when it moves."""

from __future__ import annotations

import gc
import weakref

import thunder
import torch
from oracle import oracle_linear
from thunder_te_exec import te_ex
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


def test_an_error_in_forward_leaves_a_jitted_module_usable() -> None:
    linear = nn.Linear(32, 32)
    compiled = thunder.jit(linear, executors=[te_ex])
    before = compiled(X)
    try:
        compiled(torch.randn(16, 31))
    except RuntimeError:
        pass
    assert compiled(X).shape == before.shape
