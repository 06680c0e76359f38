"""A weight that is held in FP8, as a tensor: copies, moves, and writes, which raise."""

from __future__ import annotations

import copy
import pickle

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import torch
import torch.nn.functional as F
from frozen_stack import compiled, numbers, stack
from steps import batch, same
from thunder_te_exec import dequantize_, quantize_frozen_
from thunder_te_exec.fp8_weight import Fp8Weight
from thunder_te_exec.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
)
from torch import nn


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
