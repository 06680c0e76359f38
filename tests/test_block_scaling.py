"""Block scaling in the reference backend: numbers against the oracle, layouts, stochastic rounding, what is claimed."""

from __future__ import annotations

import pytest
import thunder
import torch
from block_oracle import block_linear
from oracle import close_to_one_rounding
from programs import Checkpointed
from recipes import FLOAT8_BLOCKS, MICROSCALING
from steps import batch, same, step
from thunder_te_exec import claims, te_ex
from thunder_te_exec.backends.blocks import dequantize_blocks, quantize_blocks
from thunder_te_exec.layouts import block_shape, operand_specs
from thunder_te_exec.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    TensorRole,
)
from thunder.core.dtypes import to_torch_dtype
from torch import nn
from traces import forward_linears, tensors_saved

RECIPES = FLOAT8_BLOCKS | MICROSCALING


def dtypes(recipe: str) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if recipe.startswith("nvfp4") else (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("bias", (False, True), ids=("no-bias", "bias"))
@pytest.mark.parametrize(
    "recipe, dtype", [(name, dtype) for name in RECIPES for dtype in dtypes(name)], ids=lambda v: str(v)
)
def test_three_steps_of_a_linear_give_the_oracles_numbers(recipe, dtype, bias) -> None:
    recipe = RECIPES[recipe]()
    torch.manual_seed(0)
    # Neither a multiple of 128: the last block is a part of one.
    linear = nn.Linear(160, 224, bias).to(dtype)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe)
    oracle = block_linear(recipe)
    for n in range(3):
        x = (torch.randn(3, 64, 160) * 4.0**n).to(dtype).requires_grad_()
        g = (torch.randn(3, 64, 224) * 0.1).to(dtype)
        linear.zero_grad()
        y = compiled(x)
        y.backward(g)
        a = x.detach().reshape(-1, 160).requires_grad_()
        w = linear.weight.detach().clone().requires_grad_()
        b = linear.bias.detach().clone().requires_grad_() if bias else None
        expected = oracle(a, w, b)
        expected.backward(g.reshape(-1, 224))
        # A Hadamard transform adds 16 numbers up, of magnitude 1/4: 4 times the largest at most, of both operands.
        largest = {"a": x.abs().max().item(), "w": w.abs().max().item(), "g": g.abs().max().item()}
        close_to_one_rounding(y.reshape(-1, 224), expected, 160, 160 * 1.2 * largest["a"] * largest["w"])
        close_to_one_rounding(x.grad.reshape(-1, 160), a.grad, 224, 224 * 1.2 * largest["g"] * largest["w"])
        close_to_one_rounding(linear.weight.grad, w.grad, 192, 192 * 16 * largest["g"] * largest["a"])
        if bias:
            close_to_one_rounding(linear.bias.grad, b.grad, 192, 192 * largest["g"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_has_the_shapes_that_the_trace_says(recipe) -> None:
    linear = nn.Linear(160, 224, dtype=torch.bfloat16)
    x = torch.randn(64, 160, dtype=torch.bfloat16, requires_grad=True)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=RECIPES[recipe]())
    saved = [(tuple(t.shape), t.dtype) for t in tensors_saved(compiled(x))]
    recipe = RECIPES[recipe]()
    expected = [
        *operand_specs(recipe, TensorRole.INPUT, (64, 160), columnwise=True),
        *operand_specs(recipe, TensorRole.WEIGHT, (224, 160), columnwise=True),
    ]
    assert sorted(map(str, saved)) == sorted(str(tuple(spec)) for spec in expected)
    (linear,) = forward_linears(compiled)
    assert [(tuple(s.shape), to_torch_dtype(s.dtype)) for s in linear.output[1]] == expected


@pytest.mark.parametrize("role", TensorRole, ids=lambda r: r.name)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_matrix_of_zeros_nan_or_infinities_spoils_no_other_block(recipe, role) -> None:
    recipe = RECIPES[recipe]()
    rows, cols = (max(b, 16) for b in block_shape(recipe, role))
    torch.manual_seed(0)
    x = torch.randn(2 * rows, 2 * cols, dtype=torch.bfloat16)
    x[-1, -1] = 10.0  # under NVFP4 the largest number is in the scale of all others
    clean = dequantize_blocks(recipe, role, quantize_blocks(recipe, role, True, False, x).rowwise, columnwise=False)
    # An infinity takes the scale that all of an NVFP4 tensor has.
    values = (0.0, float("nan")) if isinstance(recipe, NVFP4BlockScaling) else (0.0, float("nan"), float("inf"))
    for value in values:
        bad = x.clone()
        bad[:rows, :cols] = value
        q = quantize_blocks(recipe, role, True, False, bad)
        found = dequantize_blocks(recipe, role, q.rowwise, columnwise=False)
        if value == 0.0:
            assert not found[:rows, :cols].any()
        assert torch.equal(found[rows:], clean[rows:]) and torch.equal(found[:, cols:], clean[:, cols:])


def test_mxfp8_scales_are_the_smallest_powers_of_two_that_do_not_saturate() -> None:
    amax = torch.tensor([448.0, 448.5, 896.0, 1.75 * 2.0**-120, 2.0**-149, 3e38, 0.0])
    x = amax[:, None].expand(-1, 32).contiguous()
    data, exponents = quantize_blocks(MXFP8BlockScaling(), TensorRole.INPUT, True, False, x).rowwise
    assert exponents[: len(amax), 0].tolist() == [127, 128, 128, 0, 0, 247, 0]
    numbers = dequantize_blocks(MXFP8BlockScaling(), TensorRole.INPUT, (data, exponents), columnwise=False)
    kept = torch.tensor([True, True, True, True, False, True, True])  # 2**-149 is below the smallest scale
    torch.testing.assert_close(numbers[kept], x.double()[kept], rtol=2.0**-4, atol=0.0)


@pytest.mark.parametrize("recipe", (Float8BlockScaling, MXFP8BlockScaling))
def test_a_number_next_to_the_largest_does_not_overflow_in_a_product_that_is_finite(recipe) -> None:
    linear = nn.Linear(128, 128, bias=False)
    nn.init.constant_(linear.weight, 1e-5)
    x = torch.zeros(32, 128)
    x[0, 0] = 3.4e38
    y = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe())(x)
    torch.testing.assert_close(y[0], linear(x)[0], rtol=2.0**-3, atol=0.0)


def rounded(seed: int, recipe: NVFP4BlockScaling, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(seed)
    q = quantize_blocks(recipe, TensorRole.GRAD_OUTPUT, True, False, x)
    return dequantize_blocks(recipe, TensorRole.GRAD_OUTPUT, q.rowwise, columnwise=False)


def test_stochastic_rounding_is_seeded_unbiased_and_between_the_two_neighbours() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    recipe = NVFP4BlockScaling()
    draws = torch.stack([rounded(seed, recipe, x) for seed in range(400)])
    assert torch.equal(rounded(3, recipe, x), draws[3]) and not torch.equal(draws[3], draws[4])
    low, high = draws.amin(0), draws.amax(0)
    # The mean of 400 draws is within 5 standard deviations of x; one draw deviates by half the spacing at most. The
    # largest of a block may round to a scale that is too small for it by 2**-4, and saturates then.
    deviation = 5 * (high - low) / 2 / 400**0.5 + 2.0**-4 * x.float().abs().amax() * (high == low)
    assert ((draws.mean(0) - x.double()).abs() <= deviation + 1e-6).all()
    nearest = NVFP4BlockScaling(disable_stochastic_rounding=True)
    assert torch.equal(rounded(0, nearest, x), rounded(1, nearest, x))


def test_a_second_backward_draws_the_same_random_numbers_and_does_not_wind_back_the_generator() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
    compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=NVFP4BlockScaling())
    leaves = list(module.parameters())
    y = compiled(torch.randn(32, 32, dtype=torch.bfloat16))
    g = torch.randn_like(y)
    first = torch.autograd.grad(y, leaves, g, retain_graph=True)
    torch.rand(7)
    before = torch.get_rng_state()
    assert same(first, torch.autograd.grad(y, leaves, g))
    assert torch.equal(before, torch.get_rng_state())
    y = compiled(torch.randn(32, 32, dtype=torch.bfloat16))
    assert not same(first, torch.autograd.grad(y, leaves, g))


def test_a_seed_gives_the_same_training() -> None:
    def train(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Checkpointed(False).bfloat16()
        compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=NVFP4BlockScaling())
        torch.manual_seed(seed)
        return [t for n in range(2) for t in step(compiled, module, batch(n).bfloat16())]

    assert same(train(1), train(1)) and not same(train(1), train(2))


@pytest.mark.parametrize("recipe", ("blocks", "mxfp8", "nvfp4"))
def test_checkpointing_changes_no_bit(recipe) -> None:
    found = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        module = Checkpointed(checkpoint).bfloat16()
        compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=RECIPES[recipe]())
        found.append([t for n in range(2) for t in step(compiled, module, batch(n).bfloat16())])
    assert same(*found)


@pytest.mark.parametrize("recipe", ("blocks", "blocks-input-2d", "mxfp8", "nvfp4"))
def test_a_cached_weight_gives_the_same_bits_also_where_the_other_direction_is_asked_for_later(recipe) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, dtype=torch.bfloat16)
    functions = [
        thunder.jit(linear, executors=[te_ex], te_fp8_recipe=RECIPES[recipe](), te_weight_cache=cached)
        for cached in (False, True)
    ]
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    outputs = []
    for function in functions:
        with torch.no_grad():
            outputs.append(function(x))  # row-wise alone
    assert torch.equal(*outputs)
    assert same(*(step(function, linear, x) for function in functions))


@pytest.mark.parametrize(
    "recipe, rows, dtype, reason",
    [
        (Float8BlockScaling, 16, torch.float32, ""),
        (Float8BlockScaling, 24, torch.float32, "24 input rows: FP8 GEMMs need a multiple of 16"),
        (MXFP8BlockScaling, 48, torch.float32, "48 input rows: FP8 GEMMs need a multiple of 32"),
        (MXFP8BlockScaling, 32, torch.float32, ""),
        (NVFP4BlockScaling, 48, torch.bfloat16, "48 input rows: FP8 GEMMs need a multiple of 32"),
        (NVFP4BlockScaling, 32, torch.bfloat16, ""),
        (NVFP4BlockScaling, 32, torch.float32, "expected one of thunder.dtypes.bfloat16 for all"),
    ],
)
def test_what_a_recipe_cannot_run_stays_in_high_precision_with_its_reason(recipe, rows, dtype, reason) -> None:
    linear = nn.Linear(64, 64, dtype=dtype)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe())
    x = torch.randn(rows, 64, dtype=dtype)
    y = compiled(x)
    (claim,) = claims(compiled)
    assert claim.claimed == (not reason) and reason in claim.reason
    assert claim.claimed or torch.equal(y, linear(x))


def with_fields(recipe, **fields):
    for name, value in fields.items():
        setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(
    "recipe, error, match",
    [
        (lambda: Float8BlockScaling(use_f32_scales=True), NotImplementedError, "use_f32_scales=True has no effect"),
        (lambda: with_fields(Float8BlockScaling(), x_block_scaling_dim=2), ValueError, "dim=.2, 2, 1.: expected"),
        (
            lambda: with_fields(Float8BlockScaling(), fp8_quant_fwd_inp=QParams(stochastic_rounding=True)),
            NotImplementedError,
            "Float8BlockScaling.fp8_quant_fwd_inp.stochastic_rounding=True is not supported",
        ),
        (lambda: MXFP8BlockScaling(margin=1), NotImplementedError, "MXFP8BlockScaling.margin=1 has no effect"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), NotImplementedError, "nvfp4_4over6='all' is not supported"),
        (
            lambda: NVFP4BlockScaling(row_scaled_activation=True),
            NotImplementedError,
            "row_scaled_activation=True is not supported",
        ),
        (
            lambda: with_fields(NVFP4BlockScaling(), disable_stochastic_rounding=True),
            NotImplementedError,
            "disable_stochastic_rounding=True has no effect in Transformer Engine once the recipe is made",
        ),
        (
            lambda: with_fields(Float8BlockScaling(), fp8_quant_fwd_inp=QParams(True, float("nan"))),
            ValueError,
            "fp8_quant_fwd_inp.amax_epsilon=nan: expected a finite number",
        ),
        (
            lambda: with_fields(NVFP4BlockScaling(), fp4_quant_fwd_inp=QParams()),
            ValueError,
            "both operands of wgrad are transformed, or neither",
        ),
        (
            lambda: with_fields(NVFP4BlockScaling(), fp4_quant_fwd_weight=QParams(stochastic_rounding=True)),
            NotImplementedError,
            "fp4_quant_fwd_weight.stochastic_rounding=True is not supported",
        ),
        (
            lambda: with_fields(MXFP8BlockScaling(), backward_override="high_precision"),
            NotImplementedError,
            "MXFP8BlockScaling.backward_override='high_precision' is not supported",
        ),
    ],
)
def test_what_is_not_honoured_raises_by_name(recipe, error, match) -> None:
    with pytest.raises(error, match=match):
        thunder.jit(nn.Linear(32, 32), executors=[te_ex], te_fp8_recipe=recipe())(torch.randn(32, 32))
