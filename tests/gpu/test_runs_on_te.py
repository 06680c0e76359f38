"""What the CPU tests show of state and repeated runs, with Transformer Engine's kernels."""

from __future__ import annotations

import pytest
import steps
import thunder
import torch
from programs import Checkpointed
from steps import same, step
from thunder_te_exec import autocast, fp8_state_dict, load_fp8_state_dict, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from torch import nn

RECIPES = {"delayed": lambda: DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling}


def module(checkpoint: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(checkpoint).to("cuda", torch.bfloat16)


def compiled(fn: nn.Module, recipe: str, **options):
    return thunder.jit(fn, executors=[te_ex], te_fp8_recipe=RECIPES[recipe](), **options)


def batch(step: int) -> torch.Tensor:
    return steps.batch(step).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_changes_no_bit_of_four_steps(recipe) -> None:
    functions = [(compiled(fn, recipe), fn) for fn in (module(False), module(True))]
    for n in range(4):
        assert same(*(step(function, fn, batch(n)) for function, fn in functions)), f"step {n}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_backward_gives_the_same_gradients_and_moves_nothing(recipe) -> None:
    fn = module(True)
    function, steady = compiled(fn, recipe), compiled(fn, recipe)
    leaves = list(fn.parameters())
    for n in range(3):
        y = function(batch(n))
        g = torch.full_like(y, 5.0**n)
        first = torch.autograd.grad(y, leaves, g, retain_graph=True)
        assert same(first, torch.autograd.grad(y, leaves, g))
        assert same(first, torch.autograd.grad(steady(batch(n)), leaves, g))


@pytest.mark.parametrize("called_before", (False, True))
def test_a_loaded_function_goes_on_with_the_same_bits(called_before) -> None:
    one, other = module(), module()
    function, loaded = compiled(one, "delayed"), compiled(other, "delayed")
    for n in range(3):
        step(function, one, batch(n))
    if called_before:
        step(loaded, other, batch(9))
    load_fp8_state_dict(loaded, fp8_state_dict(function))
    for n in range(3, 6):
        assert same(step(function, one, batch(n)), step(loaded, other, batch(n)))
    a, b = fp8_state_dict(function), fp8_state_dict(loaded)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_weight_cache_gives_the_bits_of_no_cache_under_current_scaling_and_steps_under_delayed(recipe) -> None:
    fns = [module(), module()]
    functions = [compiled(fns[0], recipe, te_weight_cache=True), compiled(fns[1], recipe)]
    steppers = [torch.optim.SGD(fn.parameters(), lr=0.01) for fn in fns]
    for n in range(3):
        found = []
        for function, fn, stepper in zip(functions, fns, steppers):
            for microbatch in range(3):
                found.append(function(batch(microbatch)).detach())
                function(batch(microbatch)).sum().backward()
            stepper.step()
            stepper.zero_grad()
        half = len(found) // 2
        if recipe == "current":
            assert same(found[:half], found[half:])
        assert all(y.isfinite().all() for y in found)


def test_a_function_follows_the_context_as_te_linear_does() -> None:
    import transformer_engine.pytorch as te

    linear = nn.Linear(64, 64, bias=False).to("cuda", torch.bfloat16)
    theirs = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
    theirs.weight.data.copy_(linear.weight)
    function = thunder.jit(linear, executors=[te_ex])
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    for recipe, enabled in ((Float8CurrentScaling(), True), (None, False), (Float8CurrentScaling(), True)):
        with te.autocast(enabled=enabled, recipe=recipe):
            assert torch.equal(function(x), theirs(x))
        with autocast(enabled=enabled, recipe=recipe):
            assert torch.equal(function(x), theirs(x))


def test_a_first_call_in_inference_mode_leaves_a_function_that_trains() -> None:
    fn = module()
    function, fresh = compiled(fn, "delayed"), compiled(fn, "delayed")
    with torch.inference_mode():
        function(batch(0))
    for n in range(2):
        assert same(step(function, fn, batch(n)), step(fresh, fn, batch(n)))
