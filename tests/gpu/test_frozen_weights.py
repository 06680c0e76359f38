"""quantize_frozen_ with Transformer Engine's kernels, and what it does to the device's memory."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from frozen_stack import RECIPES, step
from steps import same
from thunder_te_exec import dequantize_, quantize_frozen_, te_ex
from thunder_te_exec.backends import BACKENDS
from thunder_te_exec.fp8_weight import Fp8Weight
from thunder_te_exec.recipe import TensorRole
from torch import nn


def stack(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 336), nn.Linear(336, 144), nn.Linear(144, 64)).to("cuda", dtype)
    for i in (0, 2):
        module[i].weight.requires_grad_(False)
    return module


def used(matrix: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The scales of a matrix without their padding, which the kernels leave as it was."""
    data, scale_inv = matrix
    return scale_inv if scale_inv.ndim == 1 else scale_inv[tuple(slice(-(-n // 128)) for n in data.shape)]


def batch(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(n)).to("cuda", dtype)


@pytest.mark.parametrize("keep_transposed", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("recipe", ("current", "blocks"))
def test_every_bit_is_that_of_frozen_weights_which_te_ex_quantized(recipe, dtype, keep_transposed) -> None:
    plain, fp8 = stack(dtype), stack(dtype)
    quantize_frozen_(fp8, RECIPES[recipe](), keep_transposed=keep_transposed)
    functions = [(thunder.jit(m, executors=[te_ex], te_fp8_recipe=RECIPES[recipe]()), m) for m in (plain, fp8)]
    for n in range(3):
        assert same(*(step(function, m, batch(n, dtype)) for function, m in functions)), f"step {n}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_on_the_cpu_makes_the_same_bits(recipe, dtype) -> None:
    weight = torch.randn(336, 144).to(dtype)
    one, other = (
        Fp8Weight.quantized(weight.to(device), RECIPES[recipe](), "weight", keep_transposed=True)
        for device in ("cuda", "cpu")
    )
    for mine, theirs in zip(one.operand, other.operand):
        assert torch.equal(mine[0].cpu(), theirs[0])
        assert torch.equal(used(mine).cpu(), used(theirs))
    assert torch.equal(one.cpu().dequantize(), other.dequantize()) and torch.equal(
        one.dequantize().cpu(), other.dequantize()
    )


@pytest.mark.parametrize("shape", ((16, 16), (336, 144), (128, 640), (4096, 1024)))
@pytest.mark.parametrize("recipe", ("current", "blocks"))
def test_a_transposed_matrix_has_the_bits_of_one_that_was_quantized(recipe, shape) -> None:
    recipe = RECIPES[recipe]()
    backend, device = BACKENDS["te"](), torch.device("cuda")
    quantize = backend.quantizer(recipe, TensorRole.WEIGHT, None, device, rowwise=True, columnwise=True)
    q = quantize(torch.randn(shape, device=device))
    data, scale_inv = backend.transpose(recipe, TensorRole.WEIGHT)(q.rowwise)
    assert torch.equal(data, q.columnwise[0])
    assert torch.equal(used((data, scale_inv)), used(q.columnwise)) and scale_inv.shape == q.columnwise[1].shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantizing_dequantizing_and_loading_hold_one_weight_twice_and_no_more(recipe) -> None:
    size, layers = 1024, 8
    one = size * size
    slack = one // 8

    def allocated() -> int:
        return torch.cuda.memory_allocated() - before

    def peak() -> int:
        return torch.cuda.max_memory_allocated() - before

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    model.requires_grad_(False)
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    torch.cuda.reset_peak_memory_stats()
    quantize_frozen_(model, RECIPES[recipe]())
    assert allocated() <= layers * one + slack
    assert peak() <= 2 * layers * one + 2 * one + slack
    del model

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    model.requires_grad_(False)
    quantize_frozen_(model, RECIPES[recipe]())
    torch.cuda.reset_peak_memory_stats()
    model.to_empty(device="cuda")
    for name, tensor in state.items():
        model.load_state_dict({name: tensor}, strict=False)
    assert peak() <= layers * one + 4 * one + slack
    plain = copy.deepcopy(model)
    dequantize_(plain)
    assert all(p.dtype is torch.bfloat16 and type(p) is nn.Parameter for p in plain.parameters())


def test_a_step_allocates_one_transposed_weight_at_a_time() -> None:
    size, layers = 2048, 8
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        x = torch.randn(16, size, dtype=torch.bfloat16, requires_grad=True)
    model.requires_grad_(False)
    peaks = {}
    for keep in (False, True):
        fp8 = copy.deepcopy(model)
        quantize_frozen_(fp8, keep_transposed=keep)
        function = thunder.jit(fp8, executors=[te_ex])
        function(x).sum().backward()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(x).sum().backward()
        peaks[keep] = torch.cuda.max_memory_allocated() - base
    assert peaks[False] - peaks[True] <= 2 * size * size
