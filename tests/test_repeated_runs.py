"""Forwards and backwards that run more than once: checkpointing, retain_graph, several calls before a backward."""

from __future__ import annotations

import contextlib
import threading

import pytest
import thunder
import torch
from programs import Checkpointed
from steps import batch, same, step
from thunder_te_exec import autocast, fp8_state_dict, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from torch import nn
from traces import tensors_saved

RECIPES = {"delayed": lambda: DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling}


def compiled(module: nn.Module, recipe: str):
    return thunder.jit(module, executors=[te_ex], te_fp8_recipe=RECIPES[recipe]())


def plain_and_checkpointed() -> tuple[Checkpointed, Checkpointed]:
    """Two modules of the same parameters; the second computes its region again in backward."""
    torch.manual_seed(0)
    plain, checkpointed = Checkpointed(checkpoint=False), Checkpointed()
    checkpointed.load_state_dict(plain.state_dict())
    return plain, checkpointed


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_changes_no_bit_of_four_steps_and_saves_less(recipe) -> None:
    plain, checkpointed = plain_and_checkpointed()
    functions = [(compiled(module, recipe), module) for module in (plain, checkpointed)]
    for n in range(4):
        expected, found = (step(function, module, batch(n)) for function, module in functions)
        assert same(expected, found), f"step {n}"
    own = {p.data_ptr() for p in (*plain.parameters(), *checkpointed.parameters())}
    kept = [
        sum(t.nbytes for t in tensors_saved(function(batch(0))) if t.data_ptr() not in own) for function, _ in functions
    ]
    assert kept[1] < kept[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointed_calls_whose_backwards_come_later_and_in_reverse_use_their_own_scales(recipe) -> None:
    found = []
    for module in plain_and_checkpointed():
        function = compiled(module, recipe)
        inputs = [batch(n).requires_grad_() for n in range(3)]
        outputs = [function(x) for x in inputs]
        for y in reversed(outputs):
            y.backward(torch.ones_like(y))
        found.append([*(x.grad for x in inputs), *(p.grad for p in module.parameters())])
    assert same(*found)


class NoGradInside(nn.Module):
    """A checkpointed region with a linear that no gradient goes through."""

    def __init__(self, checkpoint: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.checkpoint = checkpoint

    def region(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            u = self.b(x)
        return self.a(x * u)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoint:
            return torch.utils.checkpoint.checkpoint(self.region, x, use_reentrant=False)
        return self.region(x)


def test_a_recomputed_linear_without_gradients_is_the_one_that_ran_first() -> None:
    found, keys = [], []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        module = NoGradInside(checkpoint)
        function = compiled(module, "delayed")
        inputs = [(batch(0) * 0.01 * (n + 1)).requires_grad_() for n in range(3)]
        for y in [function(x) for x in inputs]:
            y.backward(torch.ones_like(y))
        found.append([*(x.grad for x in inputs), *(p.grad for p in module.a.parameters())])
        keys.append(set(fp8_state_dict(function)))
    assert same(*found) and keys[0] == keys[1]


@pytest.mark.parametrize("checkpoint", (False, True), ids=("plain", "checkpointed"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_backward_of_one_forward_gives_the_same_gradients_and_moves_nothing(recipe, checkpoint) -> None:
    torch.manual_seed(0)
    module = Checkpointed(checkpoint)
    function, steady = compiled(module, recipe), compiled(module, recipe)
    for n in range(3):
        x = batch(n).requires_grad_()
        y = function(x)
        g = torch.full_like(y, 5.0**n)
        leaves = [x, *module.parameters()]
        first = torch.autograd.grad(y, leaves, g, retain_graph=True)
        second = torch.autograd.grad(y, leaves, g, retain_graph=True)
        assert same(list(first), list(second))
        # A function that runs each backward once: the state is the same after.
        once = torch.autograd.grad(steady(x), leaves, g)
        assert same(list(first), list(once))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_backward_after_another_call_still_gives_the_first_gradients(recipe) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 32, bias=False)
    function = compiled(linear, recipe)
    y = function(batch(0))
    (first,) = torch.autograd.grad(y, [linear.weight], torch.ones_like(y), retain_graph=True)
    step(function, linear, batch(3))
    (again,) = torch.autograd.grad(y, [linear.weight], torch.ones_like(y))
    assert torch.equal(first, again)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_calls_before_a_backward_give_the_sum_of_their_gradients(recipe) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 32, bias=False)
    function = compiled(linear, recipe)
    a, b = function(batch(0)), function(batch(1))
    (a + b).backward(torch.ones_like(a))
    together = linear.weight.grad.clone()
    linear.weight.grad = None
    function = compiled(linear, recipe)
    a, b = function(batch(0)), function(batch(1))
    # autograd runs the backward of the later call first
    b.backward(torch.ones_like(b))
    a.backward(torch.ones_like(a))
    assert torch.equal(linear.weight.grad, together)


@pytest.mark.parametrize("trained", (".", "bias"))
def test_a_gradient_of_a_gradient_raises_instead_of_being_missing(trained) -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for name, p in module.named_parameters():
        p.requires_grad_(trained in name)
    function = thunder.jit(module, executors=[te_ex])
    leaves = [p for p in module.parameters() if p.requires_grad]
    with pytest.raises(RuntimeError, match="create_graph=True .* is differentiable once"):
        torch.autograd.grad(function(batch(0)).pow(2).sum(), leaves, create_graph=True)
    # What it was called with is as usable as before.
    first = torch.autograd.grad(function(batch(0)).pow(2).sum(), leaves)
    assert len(first) == len(leaves) and all(g.isfinite().all() for g in first)


def test_a_gradient_of_a_gradient_elsewhere_in_the_same_program_is_torchs() -> None:
    module = nn.Linear(32, 32)
    function = thunder.jit(module, executors=[te_ex])
    x = torch.randn(16, 32, requires_grad=True)
    (g,) = torch.autograd.grad(torch.sin(x).sum(), x, create_graph=True)
    (function(x).sum() + g.pow(2).sum()).backward()
    assert x.grad.isfinite().all() and module.weight.grad is not None


@pytest.mark.parametrize("why", ("ragged", "not enabled", "filtered", "past the linear"))
def test_a_gradient_of_a_gradient_raises_where_no_fp8_linear_is_differentiated_too(why) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.log_scale = nn.Linear(32, 32), nn.Parameter(torch.zeros(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.log_scale.exp()

    module = Scaled()
    module.linear.requires_grad_(why != "past the linear")
    options = {"te_filter": lambda name, shape: False} if why == "filtered" else {}
    function = thunder.jit(module, executors=[te_ex], **options)
    x = torch.randn(10 if why == "ragged" else 32, 32)
    with autocast(enabled=False) if why == "not enabled" else contextlib.nullcontext():
        y = function(x)
    with pytest.raises(RuntimeError, match="create_graph=True .* is differentiable once"):
        torch.autograd.grad(y.pow(2).sum(), module.log_scale, create_graph=True)


def test_threads_that_call_one_function_at_once_get_the_gradients_of_one_that_calls_alone() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64).requires_grad_(False))
    function = thunder.jit(module, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    leaves = [p for p in module.parameters() if p.requires_grad]
    inputs = [torch.randn(32, 64, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    alone = [torch.autograd.grad(function(x).sum(), leaves) for x in inputs]
    right = []

    def run(n: int) -> None:
        for _ in range(20):
            y = function(inputs[n])
            first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
            right.append(same(first, alone[n]) and same(torch.autograd.grad(y.sum(), leaves), alone[n]))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80


def test_threads_draw_no_random_numbers_of_each_others_calls() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    function = thunder.jit(module, executors=[te_ex], te_fp8_recipe=NVFP4BlockScaling())
    leaves, x = list(module.parameters()), torch.randn(32, 64).bfloat16()
    torch.autograd.grad(function(x).sum(), leaves)

    def run() -> None:
        for _ in range(30):
            torch.autograd.grad(function(x).sum(), leaves)

    replays = []
    original = torch.random.set_rng_state
    torch.random.set_rng_state = lambda state: (replays.append(state), original(state))
    try:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.random.set_rng_state = original
    assert not replays  # none was taken for a second backward of another's call
