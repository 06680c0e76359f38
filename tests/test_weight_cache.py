"""te_weight_cache: a weight is quantized once an optimizer step, and never used when it has changed."""

from __future__ import annotations

import gc

import pytest
import thunder
import torch
import torch.optim.optimizer as optimizer_module
from programs import Checkpointed
from thunder_te_exec import te_ex
from thunder_te_exec.backends.reference import ReferenceBackend
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling, TensorRole
from torch import nn


@pytest.fixture
def quantized(monkeypatch) -> list[TensorRole]:
    """The roles of all tensors that the reference backend quantizes, in order."""
    seen: list[TensorRole] = []
    original = ReferenceBackend.quantizer

    def counting(self, recipe, role, *args, **kwargs):
        quantize = original(self, recipe, role, *args, **kwargs)

        def run(x):
            seen.append(role)
            return quantize(x)

        return run

    monkeypatch.setattr(ReferenceBackend, "quantizer", counting)
    return seen


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()


@pytest.mark.parametrize("recipe", (DelayedScaling, Float8CurrentScaling), ids=lambda r: r.__name__)
def test_a_weight_is_quantized_once_an_optimizer_step(recipe, quantized) -> None:
    linear = nn.Linear(32, 32)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe(), te_weight_cache=True)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for step in range(3):
        del quantized[:]
        for microbatch in range(4):
            compiled(batch(microbatch)).sum().backward()
        assert quantized.count(TensorRole.WEIGHT) == 1 and quantized.count(TensorRole.INPUT) == 4
        optimizer.step()
        optimizer.zero_grad()


def test_without_the_option_it_is_quantized_once_a_call(quantized) -> None:
    compiled = thunder.jit(nn.Linear(32, 32), executors=[te_ex])
    for _ in range(3):
        compiled(batch(0))
    assert quantized.count(TensorRole.WEIGHT) == 3


def accumulated(**options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling(), **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    found = []
    for step in range(3):
        for microbatch in range(3):
            y = compiled(batch(10 * step + microbatch))
            y.pow(2).mean().backward()
            found.append(y.detach())
        optimizer.step()
        found += [p.grad.clone() for p in module.parameters()]
        optimizer.zero_grad()
    return found


def test_the_numbers_are_those_without_the_cache() -> None:
    assert all(map(torch.equal, accumulated(te_weight_cache=True), accumulated()))


@pytest.mark.parametrize("optimizer", (torch.optim.SGD, torch.optim.AdamW), ids=lambda o: o.__name__)
def test_fused_optimizers_whose_writes_torch_does_not_count_are_seen(optimizer) -> None:
    linear = nn.Linear(32, 32)
    options = {"executors": [te_ex], "te_fp8_recipe": Float8CurrentScaling()}
    compiled = thunder.jit(linear, te_weight_cache=True, **options)
    stepper = optimizer(linear.parameters(), lr=0.3, fused=True)
    for _ in range(2):
        compiled(batch(0)).sum().backward()
        stepper.step()
        assert torch.equal(compiled(batch(1)), thunder.jit(linear, **options)(batch(1)))


def test_the_hook_that_counts_steps_goes_with_the_function() -> None:
    gc.collect()
    before = len(optimizer_module._global_optimizer_post_hooks)
    compiled = thunder.jit(nn.Linear(32, 32), executors=[te_ex], te_weight_cache=True)
    compiled(batch(0))
    assert len(optimizer_module._global_optimizer_post_hooks) == before + 1
    del compiled
    gc.collect()
    assert len(optimizer_module._global_optimizer_post_hooks) == before


@pytest.mark.parametrize("recipe", (DelayedScaling, Float8CurrentScaling), ids=lambda r: r.__name__)
def test_checkpointing_changes_no_bit_of_what_the_cache_gives(recipe) -> None:
    found = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        module = Checkpointed(checkpoint)
        compiled = thunder.jit(module, executors=[te_ex], te_weight_cache=True, te_fp8_recipe=recipe())
        inputs = [batch(n) for n in range(3)]
        for y in reversed([compiled(x) for x in inputs]):
            y.sum().backward()
        found.append([*(x.grad for x in inputs), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *found))


def replaced(linear: nn.Linear, value: torch.Tensor) -> None:
    linear.weight = nn.Parameter(value)


def moved(linear: nn.Linear, value: torch.Tensor) -> None:
    linear.weight.data = value


@torch.no_grad()
def copied(linear: nn.Linear, value: torch.Tensor) -> None:
    linear.weight.copy_(value)


@torch.no_grad()
def one_element(linear: nn.Linear, value: torch.Tensor) -> None:
    linear.weight[3, 5] = 9.0


def loaded(linear: nn.Linear, value: torch.Tensor) -> None:
    linear.load_state_dict({"weight": value})


@pytest.mark.parametrize("change", (replaced, moved, copied, one_element, loaded), ids=lambda f: f.__name__)
def test_a_weight_that_has_changed_is_never_used_as_it_was(change) -> None:
    linear = nn.Linear(32, 32, bias=False)
    options = {"executors": [te_ex], "te_fp8_recipe": Float8CurrentScaling()}
    compiled = thunder.jit(linear, te_weight_cache=True, **options)
    x = batch(0)
    before = compiled(x)
    change(linear, torch.randn(32, 32))
    if change is replaced:  # a jitted module keeps the parameters that it was made with
        compiled = thunder.jit(linear, te_weight_cache=True, **options)
    after = compiled(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, thunder.jit(linear, **options)(x))


def test_a_call_without_gradients_keeps_no_less_than_training_needs(quantized) -> None:
    linear = nn.Linear(32, 32)
    options = {"executors": [te_ex], "te_fp8_recipe": Float8CurrentScaling()}
    compiled, fresh = thunder.jit(linear, te_weight_cache=True, **options), thunder.jit(linear, **options)
    for _ in range(2):
        with torch.no_grad():
            compiled(batch(0))
    assert quantized.count(TensorRole.WEIGHT) == 1
    for _ in range(2):
        x, other = batch(0), batch(0)
        compiled(x).sum().backward()  # dgrad reads the other direction, which is the transpose
        fresh(other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert quantized.count(TensorRole.WEIGHT) == 1 + 2  # and the function without the cache


def test_something_that_is_not_a_boolean_is_refused() -> None:
    with pytest.raises(TypeError, match="te_weight_cache: expected True or False, got 'yes'"):
        thunder.jit(nn.Linear(32, 32), executors=[te_ex], te_weight_cache="yes")(batch(0))
