"""FP8 state saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import thunder
import torch
from resumed_run import whole_and_resumed
from safetensors.torch import load, save
from thunder_te_exec import autocast, fp8_state_dict, load_fp8_state_dict, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from torch import nn

RECIPE = {"amax_history_len": 4}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        return self.block(self.block[0](x))


def function(module: nn.Module | None = None, recipe=None):
    torch.manual_seed(0)
    module = Tied() if module is None else module
    return thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe or DelayedScaling(**RECIPE))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) * 2.0**step


def trained(steps: int = 3):
    compiled = function()
    for step in range(steps):
        compiled(batch(step)).sum().backward()
    return compiled


def test_keys_are_the_linears_full_names_and_tensors_are_what_safetensors_takes() -> None:
    state = fp8_state_dict(trained())
    assert set(state) == {"thunder_te_exec.recipes"} | {
        f"{linear}.{tensor}.{part}"
        for linear in ("block.0", "block.0#1", "block.2")
        for tensor in ("input.e4m3_4", "weight.e4m3_4", "grad_output.e5m2_4")
        for part in ("scale", "amax_history")
    }
    assert state["block.2.input.e4m3_4.scale"].shape == (1,)
    assert state["block.2.input.e4m3_4.amax_history"].shape == (4,)
    loaded = load(save(state))
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("called_before", (False, True), ids=("before the first call", "after a call"))
def test_a_loaded_function_goes_on_with_the_same_bits(called_before) -> None:
    compiled = trained()
    state = fp8_state_dict(compiled)
    other = function()
    if called_before:
        other(batch(7)).sum().backward()
    load_fp8_state_dict(other, state)
    for module in (compiled, other):
        module.zero_grad()
    for step in range(3, 6):
        a, b = compiled(batch(step)), other(batch(step))
        assert torch.equal(a, b)
        a.sum().backward()
        b.sum().backward()
    for p, q in zip(compiled.parameters(), other.parameters()):
        assert torch.equal(p.grad, q.grad)
    a, b = fp8_state_dict(compiled), fp8_state_dict(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_saved_is_a_copy() -> None:
    compiled = trained()
    state = fp8_state_dict(compiled)
    before = {name: tensor.clone() for name, tensor in state.items()}
    compiled(batch(9)).sum().backward()
    assert all(torch.equal(before[name], state[name]) for name in state)


def broken(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = dict(state)
    del state["block.2.input.e4m3_4.scale"]
    state["block.7.input.e4m3_4.scale"] = torch.ones(1)
    state["block.0.weight.e4m3_4.amax_history"] = torch.zeros(9)
    return state


def refused(state: dict[str, torch.Tensor], called_before: bool) -> tuple[str, Any]:
    """What loading ``state`` raises, and the function, of which it has changed nothing."""
    other = function()
    if called_before:
        other(batch(7))
    before = fp8_state_dict(other)
    with pytest.raises(ValueError) as e:
        load_fp8_state_dict(other, state)
    after = fp8_state_dict(other)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(e.value), other


@pytest.mark.parametrize("called_before", (False, True), ids=("before the first call", "after a call"))
def test_keys_that_do_not_fit_are_named_and_nothing_is_changed(called_before) -> None:
    good = fp8_state_dict(trained())
    message, other = refused(broken(good), called_before)
    for part in (
        "missing: block.2.input.e4m3_4.scale",
        "unexpected: block.7.input.e4m3_4.scale",
        "misshapen: block.0.weight.e4m3_4.amax_history (9,)",
    ):
        assert part in message
    load_fp8_state_dict(other, good)


@pytest.mark.parametrize("called_before", (False, True), ids=("before the first call", "after a call"))
def test_scales_that_were_cast_are_named_and_nothing_is_changed(called_before) -> None:
    good, name = fp8_state_dict(trained()), "block.0.weight.e4m3_4.scale"
    message, other = refused({**good, name: good[name].bfloat16()}, called_before)
    assert f"torch.float32, nothing was loaded; got {name} torch.bfloat16" in message
    with pytest.raises(TypeError, match="expected what fp8_state_dict gave, tensors by name, got int"):
        load_fp8_state_dict(other, 3)


def test_without_strict_what_fits_is_taken() -> None:
    good = fp8_state_dict(trained())
    some = {name: t for name, t in good.items() if not name.startswith("block.2.")}
    other = function()
    other(batch(0))
    load_fp8_state_dict(other, some, strict=False)
    after = fp8_state_dict(other)
    assert all(torch.equal(after[name], some[name]) for name in some)


def test_a_linear_that_the_file_lacks_is_named_at_the_first_call() -> None:
    good = fp8_state_dict(trained())
    some = {name: t for name, t in good.items() if not name.startswith("block.2.")}
    other = function()
    load_fp8_state_dict(other, some)
    with pytest.raises(ValueError, match="missing: block.2.grad_output"):
        other(batch(0))
    load_fp8_state_dict(other, good)
    other(batch(0))


@pytest.mark.parametrize("called_before", (False, True), ids=("before the first call", "after a call"))
@pytest.mark.parametrize("recipe", (Float8CurrentScaling(), DelayedScaling(amax_history_len=4, margin=1)))
def test_state_of_another_recipe_is_refused_by_name(recipe, called_before) -> None:
    state = fp8_state_dict(trained())
    other = function(recipe=recipe)
    if called_before:
        other(batch(0))
    with pytest.raises(ValueError, match="saved under DelayedScaling.*margin=0.*loaded under .*(Current|margin=1)"):
        load_fp8_state_dict(other, state)


def test_current_scaling_has_nothing_to_save_and_says_which_recipe_it_was() -> None:
    compiled = function(recipe=Float8CurrentScaling())
    compiled(batch(0))
    state = fp8_state_dict(compiled)
    assert set(state) == {"thunder_te_exec.recipes"}
    load_fp8_state_dict(compiled, state)
    with autocast(recipe=DelayedScaling()):
        pass
    with pytest.raises(ValueError, match="saved under Float8CurrentScaling"):
        load_fp8_state_dict(trained(), state)


def test_a_loaded_function_that_was_not_called_saves_what_was_loaded() -> None:
    state = fp8_state_dict(trained())
    other = function()
    load_fp8_state_dict(other, state)
    again = fp8_state_dict(other)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)


def test_what_was_loaded_is_not_lost_in_a_call_under_another_recipe() -> None:
    state = fp8_state_dict(trained())
    compiled = function()
    load_fp8_state_dict(compiled, state)
    with autocast(recipe=Float8CurrentScaling()), torch.no_grad():
        compiled(batch(0))
    kept = fp8_state_dict(compiled)
    assert kept.keys() == state.keys() and all(torch.equal(kept[n], state[n]) for n in state if "recipes" not in n)
    resumed = function()
    load_fp8_state_dict(resumed, kept)
    steady = trained()
    assert torch.equal(resumed(batch(3)), steady(batch(3)))


def test_a_frozen_weight_is_quantized_with_the_scale_that_was_loaded() -> None:
    torch.manual_seed(0)
    module = nn.Linear(32, 32).requires_grad_(False)
    functions = [
        thunder.jit(module, executors=[te_ex], te_fp8_recipe=DelayedScaling(**RECIPE), **options)
        for options in ({}, {"te_weight_cache": False})
    ]
    for step in range(3):
        for compiled in functions:
            compiled(batch(step))
    state = fp8_state_dict(functions[0])
    next(t for name, t in state.items() if ".weight." in name and name.endswith(".scale")).mul_(0.5)
    for compiled in functions:
        load_fp8_state_dict(compiled, state)
    assert torch.equal(*(compiled(batch(3)) for compiled in functions))


def test_modules_that_share_a_weight_load_before_the_first_call() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    compiled = function(Shared())
    compiled(batch(0)).sum().backward()
    other = function(Shared())
    load_fp8_state_dict(other, fp8_state_dict(compiled))
    assert torch.equal(compiled(batch(1)), other(batch(1)))


def test_state_of_the_recipe_in_force_loads_after_a_call_under_another() -> None:
    state = fp8_state_dict(trained())
    other = function()
    with autocast(recipe=Float8CurrentScaling()):
        other(batch(0))
    load_fp8_state_dict(other, state)
    other(batch(0))


def test_what_is_no_state_dict_of_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the entry 'thunder_te_exec.recipes'"):
        load_fp8_state_dict(function(), Tied().state_dict())


def test_a_run_that_is_stopped_and_resumed_in_a_new_process_has_the_losses_of_one_that_was_not(tmp_path) -> None:
    whole, parts = whole_and_resumed(tmp_path, "cpu")
    assert parts == whole and len(set(whole)) == 8
