"""state_dict and load_state_dict of models whose frozen weights are held in FP8: both forms, and in parts."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from frozen_stack import RECIPES, compiled, numbers, stack
from steps import batch, same
from thunder_te_exec import dequantize_, quantize_frozen_, te_ex
from thunder_te_exec.fp8_weight import Fp8Weight
from thunder_te_exec.recipe import Float8CurrentScaling
from torch import nn


@pytest.mark.parametrize("assign", (False, True))
@pytest.mark.parametrize("form", ("high_precision", "fp8"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_state_dict_of_either_form_loads_into_a_quantized_model(recipe, form, assign) -> None:
    saved, loaded = stack(), stack()
    quantize_frozen_(saved, RECIPES[recipe](), state_dict=form)
    quantize_frozen_(loaded, RECIPES[recipe](), keep_transposed=True)
    with torch.no_grad():
        for p in loaded.parameters():
            p.copy_(torch.randn(p.shape))
    state = saved.state_dict()
    assert not any(isinstance(t, Fp8Weight) for t in state.values())
    types = {"high_precision": {torch.float32}, "fp8": {torch.float32, torch.float8_e4m3fn}}
    assert {t.dtype for t in state.values()} == types[form]
    assert not loaded.load_state_dict(state, assign=assign).missing_keys
    assert isinstance(loaded[0].weight, Fp8Weight) and loaded[0].weight.keeps_transposed
    for mine, theirs in zip(numbers(saved), numbers(loaded)):
        # A scale that is computed anew, from an amax that was rounded, may differ in its last bit.
        torch.testing.assert_close(theirs, mine, rtol=0 if form == "fp8" else 2.0**-22, atol=0)
    if form == "fp8":
        x = batch(0).requires_grad_()
        assert same(*(torch.autograd.grad(compiled(m, recipe)(x).sum(), x) for m in (saved, loaded)))


def test_a_state_dict_of_high_precision_loads_into_an_ordinary_model() -> None:
    fp8, plain = stack(), stack()
    quantize_frozen_(fp8)
    plain.load_state_dict(fp8.state_dict())
    assert same(numbers(fp8), numbers(plain))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pair_loads_into_a_linear_of_the_model_that_is_not_in_fp8_now(recipe) -> None:
    fp8 = stack()
    quantize_frozen_(fp8, RECIPES[recipe](), state_dict="fp8")
    state = fp8.state_dict()
    expected = numbers(fp8)
    dequantize_(fp8)
    with torch.no_grad():
        for p in fp8.parameters():
            p.zero_()
    fp8.load_state_dict(state, strict=False)
    assert same(numbers(fp8), expected)


def test_a_weight_that_something_else_came_to_share_is_in_the_state_dict_as_numbers() -> None:
    model = nn.ModuleDict({"head": nn.Linear(32, 48, bias=False), "embedding": nn.Embedding(48, 32)})
    model.requires_grad_(False)
    quantize_frozen_(model)
    model["embedding"].weight = model["head"].weight
    assert {type(t) for t in model.state_dict().values()} == {torch.Tensor}


def test_what_a_jitted_module_saved_loads_with_its_bits_also_by_assignment() -> None:
    for assign in (False, True):
        fp8, loaded = stack(), stack()
        quantize_frozen_(fp8, Float8CurrentScaling())
        quantize_frozen_(loaded, Float8CurrentScaling(), keep_transposed=True)
        with torch.no_grad():
            for p in loaded.parameters():
                p.copy_(torch.randn(p.shape))
        loaded.load_state_dict(thunder.jit(fp8, executors=[te_ex]).state_dict(), assign=assign)
        assert same(numbers(fp8), numbers(loaded)) and loaded[0].weight.keeps_transposed


def test_it_moves_and_refuses_writes_in_inference_mode_as_outside() -> None:
    fp8 = stack()
    quantize_frozen_(fp8)
    with torch.inference_mode():
        fp8.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="0.weight: "):
            fp8[0].weight.tensor_split(2)[0].mul_(2)
        assert fp8(torch.randn(4, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert isinstance(fp8[0].weight, Fp8Weight) and fp8[0].weight.dtype is torch.bfloat16


def test_a_pair_that_does_not_fit_is_reported_and_changes_nothing() -> None:
    fp8 = stack()
    quantize_frozen_(fp8, state_dict="fp8")
    before = numbers(fp8)
    state = fp8.state_dict()
    without_scale = {k: v for k, v in state.items() if k != "0.weight_scale_inv"}
    with pytest.raises(RuntimeError, match="0.weight: torch.float8_e4m3fn, and 0.weight_scale_inv is missing"):
        fp8.load_state_dict(without_scale)
    with pytest.raises(RuntimeError, match="0.weight: expected FP8 data and scale_inv of"):
        fp8.load_state_dict(state | {"0.weight_scale_inv": torch.ones(3)})
    with pytest.raises(RuntimeError, match="0.weight: copying torch.float8_e4m3fn numbers without their scale"):
        thunder.jit(fp8, executors=[te_ex]).load_state_dict(state)
    assert same(before, numbers(fp8))


def test_a_model_on_the_meta_device_is_loaded_in_parts_without_being_there_in_high_precision() -> None:
    plain = stack()
    with torch.device("meta"):
        fp8 = stack()
    with pytest.raises(ValueError, match="0.weight is on the meta device, which has no default recipe"):
        quantize_frozen_(fp8)
    quantize_frozen_(fp8, Float8CurrentScaling(), keep_transposed=True)
    assert fp8[0].weight.is_meta and isinstance(fp8[0].weight, Fp8Weight)
    fp8.to_empty(device="cpu")
    for layer in ("0.", "1.", "2."):
        part = {k: v for k, v in plain.state_dict().items() if k.startswith(layer)}
        fp8.load_state_dict(part, strict=False)
    quantize_frozen_(plain, Float8CurrentScaling())
    assert same(numbers(fp8), numbers(plain))
    assert fp8[0].weight.nbytes == 2 * (208 * 32 + 4)
