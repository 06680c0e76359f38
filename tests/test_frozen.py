"""quantize_frozen_: frozen weights in FP8 alone give the bits of frozen weights that te_ex quantized, in less room."""

from __future__ import annotations

import copy
import pickle

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
import torch.nn.functional as F
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

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Frozen weights, of shapes that are no multiple of a block, around a trained linear; trained biases."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 208), nn.Linear(208, 144), nn.Linear(144, 32)).to(dtype)
    for i in (0, 2):
        module[i].weight.requires_grad_(False)
    return module


def compiled(module: nn.Module, recipe: str, **options):
    return thunder.jit(module, executors=[te_ex], te_fp8_recipe=RECIPES[recipe](), **options)


def step(function, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and the gradients of what is trained."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.requires_grad)]


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


# --- state_dict -------------------------------------------------------------------------------------------------------


def numbers(module: nn.Module) -> list[torch.Tensor]:
    return [p.dequantize() if isinstance(p, Fp8Weight) else p.detach() for p in module.parameters()]


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


# --- as a tensor ------------------------------------------------------------------------------------------------------


def test_copies_and_moves_keep_the_bits() -> None:
    fp8 = stack()
    quantize_frozen_(fp8, Float8BlockScaling(), keep_transposed=True)
    for module in (copy.deepcopy(fp8), pickle.loads(pickle.dumps(fp8)), copy.deepcopy(fp8).to(torch.bfloat16).float()):
        weight = module[0].weight
        assert isinstance(weight, Fp8Weight) and isinstance(weight, nn.Parameter) and not weight.requires_grad
        for mine, theirs in zip(weight.operand, fp8[0].weight.operand):
            assert same(mine, theirs) and mine[0].data_ptr() != theirs[0].data_ptr()
    assert pickle.loads(pickle.dumps(copy.deepcopy(fp8).requires_grad_(True)))[0].weight.requires_grad
    shared = copy.deepcopy(fp8).share_memory()[0].weight
    assert all(t.is_shared() for matrix in shared.operand for t in matrix)
    plain = torch.empty_like(fp8[0].weight)
    assert type(plain) is torch.Tensor and plain.dtype is torch.float32
    half = copy.deepcopy(fp8).to(torch.float16)
    assert half[0].weight.dtype == half[0].weight.dequantize().dtype == torch.float16


WRITES = {
    "mul_": lambda w: w.mul_(2),
    "data.add_": lambda w: w.data.add_(1),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "out": lambda w: torch.add(w.dequantize(), 1, out=w),
    "index": lambda w: w.__setitem__(0, 0),
    "slice": lambda w: w[:8].zero_(),
    "fill": lambda w: nn.init.zeros_(w),
    "data =": lambda w: setattr(w, "data", w.dequantize() * 2),
    "broadcast": lambda w: torch.distributed.broadcast(w.data, src=0),
    "all_reduce": lambda w: torch.distributed.all_reduce(w.data),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_one_raises_with_its_name_and_changes_nothing(write, request, tmp_path) -> None:
    if write in ("broadcast", "all_reduce"):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        request.addfinalizer(torch.distributed.destroy_process_group)
    fp8 = stack()
    quantize_frozen_(fp8)
    before = numbers(fp8)
    with torch.no_grad(), pytest.raises(RuntimeError, match="0.weight: "):
        WRITES[write](fp8[0].weight)
    assert same(before, numbers(fp8))


def test_training_one_raises_in_the_optimizers_step() -> None:
    fp8 = stack()
    quantize_frozen_(fp8, Float8CurrentScaling())
    fp8.requires_grad_(True)
    compiled(fp8, "current")(batch(0)).sum().backward()
    assert fp8[0].weight.grad.shape == (208, 32)
    with pytest.raises(RuntimeError, match="0.weight: .* call dequantize_"):
        torch.optim.SGD([fp8[0].weight], lr=0.1).step()


@pytest.mark.parametrize("safe", (False, True))
def test_peft_merges_into_one_only_after_dequantizing(safe) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"proj": nn.Linear(64, 64)}).requires_grad_(False)
    quantize_frozen_(model)
    config = peft.LoraConfig(r=16, target_modules=["proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    before = numbers(model)
    with pytest.raises(RuntimeError, match="proj.weight: .* call dequantize_"):
        model["proj"].merge(safe_merge=safe)
    assert same(before, numbers(model)) and not model["proj"].merged_adapters
    x = torch.randn(4, 64)
    expected = model["proj"](x)
    dequantize_(model)["proj"].merge(safe_merge=safe)
    merged = F.linear(x, model["proj"].base_layer.weight, model["proj"].base_layer.bias)
    torch.testing.assert_close(merged, expected)
