"""Quantization in a fuser's kernels, multiplied by Transformer Engine."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from fused_model import WITHOUT, gated, given_special_numbers, jitted, trained
from steps import same
from thunder_te_exec.recipe import DelayedScaling, Format
from thunder_te_exec.symbols import is_te_backward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("fp8", (Format.HYBRID, Format.E4M3), ids=lambda f: f.name)
def test_bits_scales_and_histories_are_those_of_te_s_own_quantization(dtype, fp8, monkeypatch) -> None:
    recipe = DelayedScaling(fp8_format=fp8, amax_history_len=4)
    compiled = jitted(gated(dtype).cuda(), monkeypatch, recipe=recipe)
    fused = trained(compiled, dtype)
    assert same(fused, trained(jitted(gated(dtype).cuda(), monkeypatch, WITHOUT, recipe), dtype))
    linears = [b for b in thunder.last_backward_traces(compiled)[-1].bound_symbols if is_te_backward(b)]
    assert all("amax" in b.kwargs for b in linears) and len(linears) == 3


def test_special_numbers_are_quantized_as_te_does(monkeypatch) -> None:
    fused = given_special_numbers(jitted(gated().cuda(), monkeypatch))
    assert same(fused, given_special_numbers(jitted(gated().cuda(), monkeypatch, WITHOUT)))
