"""quantize_frozen_: frozen weights in FP8 alone give the bits of frozen weights that te_ex quantized, in less room."""

from __future__ import annotations

import copy

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from frozen_stack import RECIPES, compiled, stack, step
from oracle import E4M3, Scaling
from programs import Checkpointed
from steps import batch, same
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import autocast, claims, dequantize_, quantize_frozen_, te_ex
from thunder_te_exec.fp8_weight import Fp8Weight
from thunder_te_exec.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from torch import nn
from torch.nn.utils.prune import l1_unstructured


@pytest.mark.parametrize("keep_transposed", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("recipe", ("current", "blocks"))
def test_every_bit_is_that_of_frozen_weights_which_te_ex_quantized(recipe, dtype, keep_transposed) -> None:
    plain, fp8 = stack(dtype), stack(dtype)
    report = quantize_frozen_(fp8, RECIPES[recipe](), keep_transposed=keep_transposed)
    assert [(w.weight, w.quantized) for w in report] == [("0.weight", True), ("1.weight", False), ("2.weight", True)]
    functions = [(compiled(m, recipe), m) for m in (plain, fp8)]
    for n in range(3):
        assert same(*(step(function, m, batch(n).to(dtype)) for function, m in functions)), f"step {n}"


@pytest.mark.parametrize("recipe", ("current", "blocks"))
def test_recomputed_linears_read_them_too(recipe) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(True)
    plain.region.requires_grad_(False)
    fp8 = copy.deepcopy(plain)
    quantize_frozen_(fp8, RECIPES[recipe]())
    functions = [(compiled(m, recipe), m) for m in (plain, fp8)]
    for n in range(3):
        assert same(*(step(function, m, batch(n)) for function, m in functions)), f"step {n}"


def test_under_delayed_scaling_a_weight_has_the_bits_that_it_settles_on() -> None:
    plain, fp8 = (stack().requires_grad_(False) for _ in range(2))
    quantize_frozen_(fp8, RECIPES["delayed"]())
    function = compiled(plain, "delayed")
    for n in range(3):
        function(batch(0).requires_grad_())
    settled = [cache._kept.operand for cache in _weight_caches(function)]
    assert len(settled) == 3
    for operand, linear in zip(settled, fp8):
        assert same(operand.rowwise, linear.weight.operand.rowwise)


def _weight_caches(function) -> list:
    from thunder_te_exec.state import Fp8State

    return list(Fp8State.of(thunder.compile_data(function)).weights.values())


@pytest.mark.parametrize("margin", (0, 1))
def test_its_numbers_are_the_weights_rounded_to_e4m3(margin) -> None:
    linear = nn.Linear(48, 64).requires_grad_(False)
    expected = Scaling(E4M3, margin=0)(linear.weight)
    recipe = Float8CurrentScaling()
    if margin:
        recipe = DelayedScaling(margin=margin)
        expected = Scaling(E4M3, margin=0)(linear.weight * 2.0**-margin) * 2.0**margin
    quantize_frozen_(linear, recipe)
    # The oracle multiplies in float64, this in float32, which rounds once.
    torch.testing.assert_close(linear.weight.dequantize().double(), expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("keep_transposed", (False, True))
def test_a_weight_takes_a_byte_an_element_and_backward_saves_no_copy_of_it(recipe, keep_transposed) -> None:
    linear = nn.Linear(256, 384, bias=False).requires_grad_(False)
    quantize_frozen_(linear, RECIPES[recipe](), keep_transposed=keep_transposed)
    directions = 1 + keep_transposed
    scales = 4 * 12 if recipe == "blocks" else 4
    assert linear.weight.nbytes <= directions * (256 * 384 + scales)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = compiled(linear, recipe)(torch.randn(32, 256, requires_grad=True))
    held = linear.weight.operand[keep_transposed]
    assert {t.data_ptr() for t in saved if t.dtype == torch.uint8} == {held[0].data_ptr()}
    y.sum().backward()


def test_what_is_not_quantized_says_why() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
            self.head.weight = self.embedding.weight
            self.odd, self.thin, self.left_out = nn.Linear(32, 40), nn.Linear(32, 16), nn.Linear(32, 32)
            self.trained, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32)
            self.half = nn.Linear(32, 32, dtype=torch.float64)

    model = Model().requires_grad_(False)
    model.trained.requires_grad_(True)
    thin = thunder_te_exec.is_thin
    report = quantize_frozen_(model, te_filter=lambda name, shape: not thin(*shape) and not name.startswith("left"))
    assert {w.weight: w.reason for w in report} == {
        "head.weight": "read by 'embedding' too, which is no linear",
        "odd.weight": "40 out_features: FP8 GEMMs need a multiple of 16",
        "thin.weight": "te_filter returned False",
        "left_out.weight": "te_filter returned False",
        "trained.weight": "trained",
        "frozen.weight": "",
        "half.weight": "torch.float64: expected float32, bfloat16 or float16",
    }
    assert [name for name, p in model.named_parameters() if isinstance(p, Fp8Weight)] == ["frozen.weight"]
    assert {w.reason for w in quantize_frozen_(Model().requires_grad_(False)) if w.weight == "thin.weight"} == {
        "thin (16 x 32): quantizing costs more than the FP8 GEMM saves (te_filter overrides)"
    }
    again = quantize_frozen_(model, Float8BlockScaling(), te_filter=lambda *_: True)
    assert {w.weight: w.reason for w in again}["frozen.weight"] == "held in FP8 already, as DelayedScaling has it"


def test_what_thunder_made_of_a_model_is_refused() -> None:
    function = thunder.jit(stack(), executors=[te_ex])
    for change in (quantize_frozen_, dequantize_):
        with pytest.raises(TypeError, match="give the model itself"):
            change(function)


def test_linears_with_one_weight_still_have_one() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    model[1].weight = model[0].weight
    assert [w.quantized for w in quantize_frozen_(model)] == [True, True]
    assert model[0].weight is model[1].weight and isinstance(model[0].weight, Fp8Weight)
    dequantize_(model)
    assert model[0].weight is model[1].weight and type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize("recipe", (MXFP8BlockScaling, NVFP4BlockScaling), ids=("mxfp8", "nvfp4"))
def test_a_recipe_with_other_scales_in_either_direction_is_refused(recipe) -> None:
    model = stack()
    with pytest.raises(NotImplementedError, match=f"{recipe.__name__} scales rows and columns"):
        quantize_frozen_(model, recipe())
    assert type(model[0].weight) is nn.Parameter


def test_a_call_under_a_recipe_of_another_format_raises_and_names_the_weight() -> None:
    fp8 = stack()
    quantize_frozen_(fp8, Float8CurrentScaling())
    function = thunder.jit(fp8, executors=[te_ex])
    with (
        autocast(recipe=Float8BlockScaling()),
        pytest.raises(RuntimeError, match="0.weight: held in FP8 as Float8Curr"),
    ):
        function(batch(0))
    with autocast(recipe=Float8CurrentScaling()):
        assert function(batch(0)).isfinite().all()


def test_in_high_precision_the_numbers_are_those_of_the_dequantized_weight() -> None:
    fp8 = stack()
    quantize_frozen_(fp8)
    plain = dequantize_(copy.deepcopy(fp8))
    functions = [fp8, thunder.jit(fp8, executors=[te_ex])]
    with autocast(enabled=False):
        expected = step(plain, plain, batch(0))
        for function in functions:
            assert same(step(function, fp8, batch(0)), expected)
    odd = batch(0)[:7]
    y = functions[1](odd)
    assert torch.equal(y, plain(odd))
    assert {c.reason for c in claims(functions[1])} == {
        "FP8 is off: compiled inside autocast(enabled=False)",
        "7 input rows: FP8 GEMMs need a multiple of 16",
    }


def test_a_compiled_function_follows_when_weights_are_quantized_and_dequantized() -> None:
    module = stack()
    reference = compiled(stack(), "current")
    function = compiled(module, "current")
    x = batch(0)
    with torch.no_grad():
        expected = reference(x)
        assert torch.equal(function(x), expected)
        quantize_frozen_(module, Float8CurrentScaling())
        assert isinstance(function.get_parameter("0.weight"), Fp8Weight)
        assert torch.equal(function(x), expected)
        dequantize_(module)
        assert torch.equal(function(x), compiled(copy.deepcopy(module), "current")(x))
    assert type(module[0].weight) is nn.Parameter and not module[0].weight.requires_grad


class AlsoElsewhere(nn.Module):
    """A weight that its linear, a regularizer and a transposed product read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        for linear in (self.one, self.other):
            linear.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.one(x)) @ self.one.weight
        return self.other(x * 2) + (self.one.weight * self.one.weight).sum()


@pytest.mark.parametrize("fused", (False, True))
def test_what_is_no_fp8_linear_reads_the_dequantized_weight_behind_a_fuser_too(fused) -> None:
    fp8 = AlsoElsewhere()
    quantize_frozen_(fp8)
    plain = dequantize_(copy.deepcopy(fp8))
    functions = [
        thunder.jit(m, executors=[te_ex, *([torch_compile_ex] if fused else [])], te_fp8_recipe=Float8CurrentScaling())
        for m in (fp8, plain)
    ]
    for rows in (32, 15):
        x = batch(0)[:rows]
        assert all(map(torch.equal, *(step(f, m, x) for f, m in zip(functions, (fp8, plain))))), f"{rows} rows"
        with torch.no_grad():
            assert torch.equal(*(f(x) for f in functions))


def test_nothing_is_kept_of_a_weight_that_is_quantized_after_a_call() -> None:
    module = stack()
    function = compiled(module, "current")
    step(function, module, batch(0))
    assert all(cache._kept is not None for cache in _weight_caches(function))
    quantize_frozen_(module, Float8CurrentScaling())
    step(function, module, batch(0))
    assert all(cache._kept is None for cache in _weight_caches(function))


def test_under_delayed_scaling_a_weight_leaves_fp8_with_its_scale() -> None:
    module = stack()
    function = compiled(module, "delayed")
    quantize_frozen_(module, RECIPES["delayed"]())
    step(function, module, batch(0))
    held = [module[i].weight.operand.rowwise for i in (0, 2)]
    dequantize_(module)
    with torch.no_grad():
        function(batch(0))
    for cache, (data, scale_inv) in zip(_weight_caches(function), held):
        assert torch.equal(cache._kept.operand.rowwise[0], data)
        torch.testing.assert_close(cache._kept.operand.rowwise[1], scale_inv, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("keep_transposed", (False, True))
def test_loading_between_forward_and_backward_raises(recipe, keep_transposed) -> None:
    fp8 = stack()
    quantize_frozen_(fp8, RECIPES[recipe](), keep_transposed=keep_transposed)
    y = compiled(fp8, recipe)(batch(0).requires_grad_())
    fp8.load_state_dict({name: 3 * t for name, t in fp8.state_dict().items()})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_computed_weight_is_not_quantized_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    nn.utils.parametrizations.weight_norm(model[0])
    l1_unstructured(model[1], "weight", 0.5)
    reasons = [w.reason for w in quantize_frozen_(model)]
    assert reasons == ["computed from other parameters (parametrized or pruned)"] * 2 + [""]
    assert sum(isinstance(p, Fp8Weight) for p in model.parameters()) == 1


def test_of_linears_with_one_weight_all_are_quantized_or_none() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    model[1].weight = model[0].weight
    report = quantize_frozen_(model, te_filter=lambda name, shape: name != "0.weight")
    assert [w.reason for w in report] == ["te_filter returned False"] * 2
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize("change", (quantize_frozen_, dequantize_))
def test_what_is_no_module_is_refused(change) -> None:
    with pytest.raises(
        TypeError, match=f"{change.__name__}: expected a torch.nn.Module first, got Float8CurrentScaling"
    ):
        change(Float8CurrentScaling())


def test_quantizing_again_changes_what_is_kept_and_how_it_is_saved() -> None:
    fp8 = stack()
    quantize_frozen_(fp8, Float8CurrentScaling())
    bits = fp8[0].weight.operand.rowwise
    quantize_frozen_(fp8, Float8CurrentScaling(), keep_transposed=True, state_dict="fp8")
    assert fp8[0].weight.keeps_transposed and fp8.state_dict()["0.weight"].dtype is torch.float8_e4m3fn
    quantize_frozen_(fp8, Float8CurrentScaling())
    assert not fp8[0].weight.keeps_transposed and same(bits, fp8[0].weight.operand.rowwise)


def test_what_a_user_put_on_a_parameter_stays_on_it() -> None:
    fp8 = stack()
    fp8[0].weight.no_weight_decay = True
    quantize_frozen_(fp8)
    assert fp8[0].weight.no_weight_decay
    dequantize_(fp8)
    assert fp8[0].weight.no_weight_decay and not hasattr(fp8[0].weight, "operand")


def test_quantized_in_inference_mode_it_serves_training() -> None:
    fp8 = stack()
    with torch.inference_mode():
        quantize_frozen_(fp8, Float8CurrentScaling())
    assert all(t.isfinite().all() for t in step(compiled(fp8, "current"), fp8, batch(0)))
