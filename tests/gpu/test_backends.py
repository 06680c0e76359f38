"""The te backend against the reference on the same device."""

from __future__ import annotations

import math

import pytest
import thunder
import torch
from recipes import FLOAT8_BLOCKS
from thunder_te_exec import claims, te_ex
from thunder_te_exec.backends.base import OPERANDS
from thunder_te_exec.backends.reference import ReferenceBackend
from thunder_te_exec.backends.te import TransformerEngineBackend
from thunder_te_exec.layouts import block_shape, operand_specs
from thunder_te_exec.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Product,
    QParams,
    TensorRole,
    quantization_params,
)
from thunder_te_exec.state import AmaxGroup
from torch import nn

CUDA = torch.device("cuda")
TE, REFERENCE = TransformerEngineBackend(), ReferenceBackend()


def current(**params) -> Float8CurrentScaling:
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = QParams(**params)
    return recipe


RECIPES = {
    "delayed": DelayedScaling,
    "delayed-e4m3": lambda: DelayedScaling(fp8_format=Format.E4M3),
    "current": Float8CurrentScaling,
    "current-powers-of-two": lambda: current(power_2_scale=True),
    "current-epsilon": lambda: current(amax_epsilon=1e-3),
}


def hard_tensors(shape: tuple[int, int] = (64, 128)) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(shape, device=CUDA)
    with_nan, with_inf, with_both = x.clone(), x.clone(), x.clone()
    with_nan[3, 5] = float("nan")
    with_inf[3, 5] = float("inf")
    with_both[3, 5], with_both[4, 4] = -float("inf"), float("nan")
    spread = x * torch.exp2(torch.randint(-20, 10, x.shape, device=CUDA).float())
    named = {"normal": x, "spread": spread, "tiny": x * 1e-30, "subnormal": x * 1e-42, "huge": x * 1e36, "zero": x * 0}
    return named | {"nan": with_nan, "inf": with_inf, "inf and nan": with_both, "all nan": x * float("nan")}


@pytest.mark.parametrize("role", TensorRole, ids=lambda r: r.name)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_quantized_tensors_scales_and_amaxes_are_equal_bit_for_bit(dtype, recipe, role) -> None:
    recipe = RECIPES[recipe]()
    for name, x in hard_tensors().items():
        for rowwise, columnwise in ((True, False), (False, True), (True, True)):
            found = []
            for backend in (TE, REFERENCE):
                group = AmaxGroup(3, 4, torch.float8_e4m3fn, CUDA)
                group.scale.fill_(37.3)
                slot = group.slot(1) if isinstance(recipe, DelayedScaling) else None
                quantize = backend.quantizer(recipe, role, slot, CUDA, rowwise=rowwise, columnwise=columnwise)
                found.append((quantize(x.to(dtype).contiguous()), group.history))
            (ours, our_history), (theirs, their_history) = found
            assert torch.equal(our_history, their_history), name
            for what, a, b in zip(("rowwise", "columnwise"), ours, theirs):
                assert (a is None) == (b is None), f"{name}: {what}"
                assert a is None or all(map(torch.equal, a, b)), f"{name}: {what}"


@pytest.mark.parametrize("margin", (0, 2))
@pytest.mark.parametrize("algo", ("max", "most_recent"))
@pytest.mark.parametrize("length", (1, 3))
def test_scale_updates_are_equal_bit_for_bit(length, algo, margin) -> None:
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo, margin=margin)
    groups = [AmaxGroup(64, length, torch.float8_e4m3fn, CUDA) for _ in range(2)]
    torch.manual_seed(0)
    for step in range(6):
        amaxes = torch.rand(64, device=CUDA) * 10.0**step
        amaxes[0], amaxes[1] = 0.0, 1e-42
        amaxes[2] = float("inf") if step == 1 else 3.0
        amaxes[3] = float("nan") if step == 2 else 2.0
        for backend, group in zip((TE, REFERENCE), groups):
            group.history[0].copy_(amaxes)
            backend.update_scales(group, recipe)
        assert torch.equal(groups[0].scale, groups[1].scale)
        assert torch.equal(groups[0].history.nan_to_num(-1), groups[1].history.nan_to_num(-1))


def without_padding(recipe, role: TensorRole, matrix, shape: tuple[int, int]):
    """The tensors of a quantized matrix of ``shape``, its rows along the contraction, without what is not read."""
    (data, scales), block = matrix, block_shape(recipe, role)
    rows, cols = (math.ceil(n / b) for n, b in zip(shape, block))
    return data, scales[:rows, :cols] if block[0] > 1 else scales[:cols, :rows]


@pytest.mark.parametrize("shape", ((256, 384), (64, 128), (48, 80), (16, 16)), ids=str)
@pytest.mark.parametrize("role", TensorRole, ids=lambda r: r.name)
@pytest.mark.parametrize("recipe", FLOAT8_BLOCKS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_blocks_and_their_scales_are_equal_bit_for_bit(dtype, recipe, role, shape) -> None:
    recipe = FLOAT8_BLOCKS[recipe]()
    for name, x in hard_tensors(shape).items():
        for rowwise, columnwise in ((True, False), (False, True), (True, True)):
            theirs, ours = (
                backend.quantizer(recipe, role, None, CUDA, rowwise=rowwise, columnwise=columnwise)(x.to(dtype))
                for backend in (TE, REFERENCE)
            )
            for columnwise, a, b in zip((False, True), theirs, ours):
                assert (a is None) == (b is None), name
                if a is None:
                    continue
                specs = list(operand_specs(recipe, role, shape, columnwise=columnwise))
                assert specs == [(tuple(t.shape), t.dtype) for t in a] == [(tuple(t.shape), t.dtype) for t in b]
                a, b = (without_padding(recipe, role, m, shape[::-1] if columnwise else shape) for m in (a, b))
                assert all(map(torch.equal, a, b)), f"{name}, column-wise: {columnwise}"


# Measured against float64: TE's split accumulation on Hopper errs by 1.3e-4 of the norm, its fast one by 3.4e-4, at
# 512 terms; the bounds are those of 14-bit and 13-bit partial sums, and one rounding of the output's type.
@pytest.mark.parametrize("split, accumulation", ((True, 2.0**-12), (False, 2.0**-11)), ids=("split", "fast"))
@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((64, 128, 96), (2048, 1024, 512)), ids=str)
def test_gemms_agree_to_their_accumulation_and_one_rounding(shape, out_dtype, split, accumulation) -> None:
    m, n, k = shape
    torch.manual_seed(0)
    recipe = Float8CurrentScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=split))
    operands = []
    for rows in (m, n):
        x = torch.randn(rows, k, device=CUDA, dtype=torch.bfloat16)
        operands.append(TE.quantizer(recipe, TensorRole.INPUT, None, CUDA, rowwise=True, columnwise=False)(x).rowwise)
    bias, into = torch.randn(n, device=CUDA, dtype=out_dtype), torch.randn(m, n, device=CUDA, dtype=out_dtype) * 30
    for added in ((None, None), (bias, None), (None, into), (bias, into)):
        found = []
        for backend in (TE, REFERENCE):
            copies = [t if t is None else t.clone() for t in added]
            found.append(backend.gemm(recipe, Product.FPROP, out_dtype)(*operands, *copies))
            assert copies[1] is None or found[-1].data_ptr() == copies[1].data_ptr()
        a, b = (t.double() for t in found)
        assert (a - b).norm() / b.norm() <= accumulation + torch.finfo(out_dtype).eps


@pytest.mark.parametrize("recipe", FLOAT8_BLOCKS)
@pytest.mark.parametrize("product", Product, ids=lambda p: p.name)
def test_block_scaled_gemms_agree_to_float32_accumulation_and_one_rounding(product, recipe) -> None:
    torch.manual_seed(0)
    recipe = FLOAT8_BLOCKS[recipe]()
    operands = []
    for (role, columnwise), rows in zip(OPERANDS[product], (192, 160)):
        x = torch.randn(*((320, rows) if columnwise else (rows, 320)), device=CUDA, dtype=torch.bfloat16)
        q = TE.quantizer(recipe, role, None, CUDA, rowwise=not columnwise, columnwise=columnwise)(x)
        operands.append(q.columnwise if columnwise else q.rowwise)
    into = torch.randn(192, 160, device=CUDA, dtype=torch.bfloat16) * 30
    for dtype, accumulate, rounding in ((torch.float32, False, 0.0), (torch.bfloat16, True, 2.0**-8)):
        a, b = (
            backend.gemm(recipe, product, dtype)(*operands, None, into.clone() if accumulate else None)
            for backend in (TE, REFERENCE)
        )
        assert a.shape == (192, 160)
        assert (a.double() - b.double()).norm() / b.double().norm() <= 2.0**-12 + rounding


def is_equal_but_for_negative_zeros(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Packed FP4 numbers; TE's reference writes a negative zero as zero."""
    codes = [torch.stack((t & 15, t >> 4)) for t in (a, b)]
    return torch.equal(*(torch.where(c == 8, torch.zeros_like(c), c) for c in codes))


@pytest.mark.parametrize("transform", (False, True), ids=("plain", "hadamard"))
@pytest.mark.parametrize("role", (TensorRole.INPUT, TensorRole.WEIGHT), ids=lambda r: r.name)
def test_nvfp4_is_quantized_as_by_transformer_engines_own_reference(role, transform) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    recipe = NVFP4BlockScaling(disable_rht=not transform, disable_stochastic_rounding=True)
    block = block_shape(recipe, role)
    theirs = NVFP4QuantizerRef(
        Fp4Formats.E2M1, quant_tile_shape=block, with_rht=quantization_params(recipe, role).random_hadamard_transform
    )
    ours = REFERENCE.quantizer(recipe, role, None, CUDA, rowwise=True, columnwise=True)
    for name, x in hard_tensors((64, 128)).items():
        if name in ("huge", "inf", "nan", "inf and nan", "all nan"):
            continue  # what its float32 products make of them is not what the kernels do
        x = x.bfloat16()
        q, (row, column) = theirs.quantize(x), ours(x)
        for data, scale, amax, matrix in (
            (q.data, q.scale, q.global_amax_row, row),
            (q.data_t, q.scale_t, q.global_amax_col, column),
        ):
            assert is_equal_but_for_negative_zeros(data, matrix[0]), name
            assert torch.equal(scale.view(torch.uint8), matrix[1][: scale.shape[0], : scale.shape[1]]), name
            assert torch.equal(amax, matrix[2]), name


@pytest.mark.parametrize("recipe", (MXFP8BlockScaling, NVFP4BlockScaling), ids=lambda r: r.__name__)
def test_what_needs_blackwell_runs_in_high_precision_with_the_reason_and_raises_where_te_is_asked_for(recipe) -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this device runs it")
    reason = "compute capability 10.0 or higher required"
    linear = nn.Linear(64, 64).to(CUDA, torch.bfloat16)
    x = torch.randn(32, 64, device=CUDA, dtype=torch.bfloat16)
    function = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe())
    with pytest.warns(UserWarning, match=reason):
        assert torch.equal(function(x), linear(x))
    assert all(reason in c.reason for c in claims(function))
    with pytest.raises(RuntimeError, match=f"te_backend='te' cannot run {recipe.__name__} on cuda.*{reason}"):
        thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe(), te_backend="te")(x)
    reference = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe(), te_backend="reference")
    assert not torch.equal(reference(x), linear(x)) and all(c.claimed for c in claims(reference))


def test_a_custom_recipe_is_refused_by_name() -> None:
    from transformer_engine.common.recipe import CustomRecipe

    function = thunder.jit(nn.Linear(64, 64).cuda(), executors=[te_ex], te_fp8_recipe=CustomRecipe(qfactory=print))
    with pytest.raises(
        NotImplementedError, match="recipe CustomRecipe is not supported by thunder_te_exec; use one of"
    ):
        function(torch.randn(32, 64, device=CUDA))


@pytest.mark.parametrize("recipe", ("delayed", "current", "blocks"))
def test_training_on_the_reference_backend_follows_te(recipe) -> None:
    found = []
    for name in ("te", "reference"):
        torch.manual_seed(0)
        layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        module = nn.Sequential(*layers).to(CUDA, torch.bfloat16)
        compiled = thunder.jit(
            module, executors=[te_ex], te_backend=name, te_fp8_recipe=(RECIPES | FLOAT8_BLOCKS)[recipe]()
        )
        values = []
        for _ in range(4):
            x = torch.randn(64, 64, device=CUDA, dtype=torch.bfloat16).requires_grad_()
            y = compiled(x)
            y.float().pow(2).mean().backward()
            values += [y, x.grad, *(p.grad.clone() for p in module.parameters())]
            module.zero_grad()
        found.append(values)
    # A product that rounds to another bfloat16 now and then falls to another FP8 number: 2**-2 of 1 in 1000 gradients.
    tolerance = 2.0**-2 * 1000**-0.5 + 4 * torch.finfo(torch.bfloat16).eps
    for a, b in zip(*found):
        assert (a.double() - b.double()).norm() / b.double().norm() <= tolerance
