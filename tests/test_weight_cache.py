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
from thunder_te_exec.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    NVFP4BlockScaling,
    TensorRole,
)
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


def frozen_linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 32).requires_grad_(False)


@pytest.mark.parametrize("recipe, times", ((DelayedScaling, 2), (Float8CurrentScaling, 1), (Float8BlockScaling, 1)))
def test_a_frozen_weight_is_quantized_once_and_once_more_when_its_delayed_scale_is_known(
    recipe, times, quantized
) -> None:
    compiled = thunder.jit(frozen_linear(), executors=[te_ex], te_fp8_recipe=recipe())
    for n in range(5):
        compiled(batch(n)).sum().backward()
    with torch.no_grad():
        compiled(batch(0))
    # Compiling again forgets it.
    assert quantized.count(TensorRole.WEIGHT) == times + 1
    everything = thunder.jit(frozen_linear(), executors=[te_ex], te_fp8_recipe=recipe(), te_weight_cache=False)
    del quantized[:]
    for n in range(5):
        everything(batch(n)).sum().backward()
    assert quantized.count(TensorRole.WEIGHT) == 5


@pytest.mark.parametrize(
    "recipe",
    (
        lambda: DelayedScaling(amax_history_len=2),
        lambda: DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
        Float8CurrentScaling,
        NVFP4BlockScaling,
    ),
    ids=("delayed", "most recent", "current", "nvfp4"),
)
def test_keeping_frozen_weights_changes_no_bit_of_seven_steps(recipe) -> None:
    found = []
    for keep in (None, False):
        torch.manual_seed(0)
        module = Checkpointed(True).bfloat16()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in ("region.0.weight", "last.weight"))
        options = {} if keep is None else {"te_weight_cache": keep}
        compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe(), **options)
        optimizer = torch.optim.SGD((p for p in module.parameters() if p.requires_grad), lr=0.1)
        torch.manual_seed(1)
        for n in range(7):
            x = torch.randn(32, 32).bfloat16().requires_grad_()
            y = compiled(x)
            y.float().pow(2).mean().backward()
            found_here = [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
            found.append(found_here)
            optimizer.step()
            optimizer.zero_grad()
    assert all(all(map(torch.equal, a, b)) for a, b in zip(found[:7], found[7:]))


@pytest.mark.parametrize("recipe", (DelayedScaling, Float8CurrentScaling), ids=lambda r: r.__name__)
@pytest.mark.parametrize("fused", (False, True))
def test_a_weight_that_was_trained_between_two_times_of_being_frozen_is_not_used_as_it_was(fused, recipe) -> None:
    linear = frozen_linear()
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe())
    steady = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe(), te_weight_cache=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5, fused=fused)
    for frozen in (True, False, True, False, True):
        linear.requires_grad_(not frozen)
        for n in range(3):
            assert torch.equal(compiled(batch(n)), steady(batch(n)))
            compiled(batch(n)).sum().backward()
            steady(batch(n)).sum().backward()
            optimizer.step()


def test_an_in_place_write_to_a_frozen_weight_is_seen() -> None:
    linear = frozen_linear()
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    before = compiled(batch(0))
    linear.weight.add_(1.0)
    after = compiled(batch(0))
    fresh = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    assert not torch.equal(before, after) and torch.equal(after, fresh(batch(0)))


def test_peft_merges_and_unmerges_frozen_weights_that_stay_quantized() -> None:
    peft = pytest.importorskip("peft", reason="needs the extra [demo]")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=False), module
    )
    compiled = thunder.jit(adapted, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    x = torch.randn(32, 64)
    for merged in (False, True, False, True, False):
        for layer in (adapted[0], adapted[2]):
            if merged != layer.merged:
                (layer.merge if merged else layer.unmerge)()
        ours, expected = compiled(x), adapted(x)
        assert (ours - expected).norm() <= 0.1 * expected.norm(), merged


def test_a_weight_whose_data_is_replaced_twice_is_seen_where_memory_is_used_again() -> None:
    linear = nn.Linear(512, 512, bias=False).requires_grad_(False)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    x = torch.randn(32, 512)
    for n in range(1, 6):
        compiled(x)
        linear.weight.data = torch.full((512, 512), 100.0 * n)
        linear.weight.data = torch.full((512, 512), float(n))
        torch.testing.assert_close(compiled(x), linear(x), rtol=0.1, atol=1.0 * n)


def test_a_kept_weight_can_be_swapped_for_another_tensor() -> None:
    linear = frozen_linear()
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    compiled(batch(0))
    torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.randn(32, 32), requires_grad=False))
    fresh = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    assert torch.equal(compiled(batch(0)), fresh(batch(0)))


def test_a_computed_weight_is_not_kept(quantized) -> None:
    weight = torch.randn(32, 32)
    compiled = thunder.jit(lambda x, w: nn.functional.linear(x, w * 2.0), executors=[te_ex])
    for n in range(3):
        compiled(batch(n), weight)
    assert quantized.count(TensorRole.WEIGHT) == 3


@pytest.mark.parametrize("recipe", (DelayedScaling, Float8CurrentScaling), ids=lambda r: r.__name__)
@pytest.mark.parametrize("frozen", (False, True))
def test_a_first_call_in_inference_mode_leaves_weights_that_can_be_trained_with(frozen, recipe) -> None:
    found = []
    for keep in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(not frozen))
        compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe(), te_weight_cache=keep)
        with torch.inference_mode():
            compiled(batch(0))
        compiled(batch(0)).sum().backward()
        found.append(module[0].weight.grad)
    assert torch.equal(*found)


def test_something_that_is_not_a_boolean_is_refused() -> None:
    with pytest.raises(TypeError, match="te_weight_cache: expected True or False, got 'yes'"):
        thunder.jit(nn.Linear(32, 32), executors=[te_ex], te_weight_cache="yes")(batch(0))
