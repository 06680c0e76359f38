"""The traces of traces_golden/, one file a program. ``pytest --snapshot-update`` rewrites them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import thunder
import torch
from programs import (
    TRAINING,
    a_checkpointed_region,
    a_detached_value_written_to_in_place,
    every_even_linear_frozen,
    first_linear_frozen_and_no_input_gradient,
    lora_mlp_in_bfloat16,
    nothing_frozen,
    only_the_last_bias_trained,
)
from recipes import FLOAT8_BLOCKS, MICROSCALING
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import passes
from thunder_te_exec import quantize_frozen_
from thunder_te_exec.passes import PASSES
from thunder_te_exec.executor import te_high_precision
from thunder_te_exec.passes.delayed_wgrad import delayed_wgrad
from thunder_te_exec.passes.high_precision_weights import high_precision_weights
from traces import as_text, jitted, joint_trace


@pytest.mark.parametrize("program", TRAINING, ids=lambda p: p.__name__)
def test_forward_and_backward_traces_are_the_golden_ones(program, golden) -> None:
    module, x = program()
    compiled = jitted(module, x)
    text = as_text(thunder.last_traces(compiled)[-1], *thunder.last_backward_traces(compiled)[-1:])
    assert text == golden(name=program.__name__)


@pytest.mark.parametrize("recipe", ("blocks", "mxfp8", "nvfp4"))
def test_block_scaling_saves_what_its_golden_trace_shows(recipe, golden) -> None:
    module, x = every_even_linear_frozen()
    compiled = jitted(module.bfloat16(), x.bfloat16(), te_fp8_recipe=(FLOAT8_BLOCKS | MICROSCALING)[recipe]())
    text = as_text(thunder.last_traces(compiled)[-1], *thunder.last_backward_traces(compiled)[-1:])
    assert text == golden(name=f"every_even_linear_frozen_{recipe}")


def test_inference_trace_is_the_golden_one(golden) -> None:
    module, x = nothing_frozen()
    with torch.no_grad():
        compiled = jitted(module, x)
    assert as_text(thunder.last_traces(compiled)[-1]) == golden(name="inference")


@pytest.mark.parametrize("name", [run.__name__ for run in PASSES])
def test_each_pass_rewrites_its_program_as_its_golden_trace_shows(name, golden) -> None:
    programs = {
        "recomputed_linears": a_checkpointed_region,
        "zero_gradients": a_detached_value_written_to_in_place,
        "redundant_casts": lora_mlp_in_bfloat16,
        "small_scalings": lora_mlp_in_bfloat16,
        "sums_in_gemms": lora_mlp_in_bfloat16,
        "merged_adapters": lora_mlp_in_bfloat16,
        "shared_inputs": lora_mlp_in_bfloat16,
        "recomputed_activations": lora_mlp_in_bfloat16,
        "waiting_gradients": lora_mlp_in_bfloat16,
        "fused_quantizations": lora_mlp_in_bfloat16,
        "adjacent_linears": lora_mlp_in_bfloat16,
        "differentiable_once": only_the_last_bias_trained,
    }
    module, x = programs.get(name, first_linear_frozen_and_no_input_gradient)()
    by_a_fuser = name in ("recomputed_activations", "waiting_gradients", "fused_quantizations", "adjacent_linears")
    trace, _ = joint_trace(module, x, behind=[torch_compile_ex] if by_a_fuser else [])
    for run in PASSES:
        rewritten = run(trace)
        if run.__name__ == name:
            assert f"{as_text(trace)}\n# --- after {name} ---\n{as_text(rewritten)}" == golden(name=f"pass_{name}")
        trace = rewritten


def test_high_precision_reads_of_fp8_weights_are_those_of_the_golden_trace(golden) -> None:
    module, x = first_linear_frozen_and_no_input_gradient()
    module[0].weight.requires_grad_(True)
    module[1].weight.requires_grad_(False)
    module[0].bias = None
    quantize_frozen_(module)
    name = "high_precision_weights"
    before, _ = joint_trace(module, x[:15])  # of which no linear is claimed
    after = high_precision_weights(before, {"t_1_weight"}, te_high_precision)
    assert f"{as_text(before)}\n# --- after {name} ---\n{as_text(after)}" == golden(name=f"pass_{name}")


def test_every_pass_is_a_file_of_its_name_and_in_the_readme() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    for run in (*PASSES, high_precision_weights, delayed_wgrad):
        assert run.__module__ == f"{passes.__name__}.{run.__name__}"
        assert f"[`{run.__name__}`](passes/{run.__name__}.py)" in readme


def test_traces_are_the_same_from_run_to_run() -> None:
    texts = set()
    for _ in range(2):
        compiled = jitted(*TRAINING[0]())
        traces = (thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1])
        texts.add("".join(re.sub("# Constructed by .*", "", trace.python()) for trace in traces))
    assert len(texts) == 1
