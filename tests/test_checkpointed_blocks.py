"""torch.utils.checkpoint around jitted blocks and functions: a second run takes its first one's scales."""

from __future__ import annotations

import pytest
import thunder
import torch
from block_model import SOME_RECIPES, Model, jitted_by, tokens
from steps import same
from thunder_te_exec import autocast, fp8_state_dict, jit_blocks, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from torch import nn
from torch.utils.checkpoint import checkpoint


def outstanding(model: nn.Module, steps: int = 2, microbatches: int = 3) -> list[torch.Tensor]:
    """Outputs and gradients of steps of several forwards, whose backwards come in reverse order."""
    found = []
    for step in range(steps):
        ys = [model(tokens(10 * step + i)) * 4.0**i for i in range(microbatches)]
        for y in reversed(ys):
            y.square().mean().backward()
        found += [*(y.detach() for y in ys), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return found


@pytest.mark.parametrize("recipe,cached", ((*((recipe, None) for recipe in SOME_RECIPES), ("delayed", True))))
@pytest.mark.parametrize("reentrant", (None, False, True), ids=("plain", "non-reentrant", "reentrant"))
def test_microbatches_outstanding_have_the_bits_of_the_whole_model_also_checkpointed(recipe, reentrant, cached) -> None:
    whole = jitted_by(thunder.jit, recipe, te_weight_cache=cached)
    blocks = jitted_by(jit_blocks, recipe, Model(reentrant=reentrant), te_weight_cache=cached)
    assert same(outstanding(whole), outstanding(blocks))
    a, b = fp8_state_dict(whole), fp8_state_dict(blocks)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("reentrant", (None, False, True), ids=("plain", "non-reentrant", "reentrant"))
def test_a_second_backward_of_one_forward_gives_the_same_gradients_and_moves_nothing(reentrant) -> None:
    model = jitted_by(jit_blocks, model=Model(reentrant=reentrant))
    for step in range(3):
        loss = model(tokens(step)).square().mean()
        loss.backward(retain_graph=True)
        first, state = [p.grad for p in model.parameters()], fp8_state_dict(model)
        model.zero_grad()
        loss.backward()
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, (p.grad for p in model.parameters())))
        assert all(torch.equal(tensor, state[name]) for name, tensor in fp8_state_dict(model).items())
        model.zero_grad()


def test_several_calls_in_one_checkpoint_are_each_quantized_as_they_were() -> None:
    found = []
    for checkpointed in (False, True):
        model = jitted_by(jit_blocks)
        layers = model.layers

        def run(x: torch.Tensor, layers=layers) -> torch.Tensor:
            return layers[1](layers[0](layers[1](x * 3.0)))

        xs = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(2)]
        ys = [checkpoint(run, x, use_reentrant=False) if checkpointed else run(x) for x in xs]
        for y in ys:
            y.square().sum().backward()
        found.append([*(x.grad for x in xs), *(p.grad for p in layers.parameters() if p.grad is not None)])
        found[-1] += fp8_state_dict(model).values()
    assert same(*found)


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpoint_without_gradients_moves_no_scales(reentrant) -> None:
    model = jitted_by(jit_blocks, model=Model(reentrant=reentrant))
    with torch.no_grad():
        model(tokens(0))
    assert all((tensor == 1).all() for name, tensor in fp8_state_dict(model).items() if name.endswith("scale"))


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpoint_that_runs_again_under_another_recipe_raises(reentrant) -> None:
    model = jitted_by(jit_blocks, model=Model(reentrant=reentrant))
    with autocast(recipe=Float8CurrentScaling()):
        loss = model(tokens(0)).square().mean()
    with pytest.raises(RuntimeError, match="call backward in the FP8 context of the forward"):
        loss.backward()


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_checkpointed_function_of_thunder_jit_takes_its_first_runs_scales(reentrant) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        function = thunder.jit(module, executors=[te_ex], te_fp8_recipe=DelayedScaling(amax_history_len=2))
        xs = [(torch.randn(16, 32) * 3.0**i).requires_grad_() for i in range(3)]
        ys = [checkpoint(function, x, use_reentrant=reentrant) if checkpointed else function(x) for x in xs]
        for y in reversed(ys):
            y.square().sum().backward()
        found.append(
            [*(x.grad for x in xs), *(p.grad for p in module.parameters()), *fp8_state_dict(function).values()]
        )
    assert same(*found)


@pytest.mark.parametrize("checkpointed", (False, True))
def test_what_runs_without_gradients_inside_a_checkpoint_moves_no_scales(checkpointed) -> None:
    linear = torch.nn.Linear(32, 32)
    function = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=SOME_RECIPES["delayed"]())
    x = torch.randn(32, 32, requires_grad=True)
    function(x).sum().backward()
    before = {name: t.clone() for name, t in fp8_state_dict(function).items() if name.endswith("scale")}

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            t = function(x * 3)
        return x * t.mean()

    (checkpoint(region, x, use_reentrant=False) if checkpointed else region(x)).sum().backward()
    after = fp8_state_dict(function)
    assert all(torch.equal(after[name], scale) for name, scale in before.items())


def test_hooks_on_saved_tensors_that_are_no_checkpoints_change_nothing() -> None:
    linear = torch.nn.Linear(32, 32)
    function = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=SOME_RECIPES["current"]())
    x = torch.randn(32, 32, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.detach):
        assert same(expected, torch.autograd.grad(function(x).sum(), x))
