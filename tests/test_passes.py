"""What each pass guarantees of a joint trace; each test fails when its pass is taken out."""

from __future__ import annotations

import pytest
from programs import (
    TRAINING,
    a_checkpointed_region,
    a_detached_value_written_to_in_place,
    every_even_linear_frozen,
    lora_mlp_in_bfloat16,
    one_weight_in_two_linears,
    only_biases_trained,
    only_the_last_bias_trained,
)
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec.passes import (
    PASSES,
    adjacent_linears,
    differentiable_once,
    fewest_saved_tensors,
    fp8_meta_sync,
    fused_quantizations,
    merged_adapters,
    needed_gradients,
    number_linears,
    recomputed_activations,
    recomputed_linears,
    redundant_casts,
    shared_inputs,
    small_scalings,
    sums_in_gemms,
    waiting_gradients,
    zero_gradients,
)
from thunder_te_exec.passes.patterns import cast_from, is_matmul, is_plain_linear, is_pointwise, scaled_by
from thunder_te_exec.symbols import (
    ctx_of,
    is_te_backward,
    is_te_linear,
    is_te_quantize,
    is_te_recompute,
    te_differentiable_once,
    te_sync_fp8_meta_bwd,
)
from traces import flags, joint_trace, makes_everything_before_it_is_read, products_in_backward


def rewritten(trace: TraceCtx, *, without=None) -> TraceCtx:
    for run in PASSES:
        if run is not without:
            trace = run(trace)
    return trace


def both_directions(trace: TraceCtx) -> tuple[list, list]:
    return [b for b in trace.bound_symbols if is_te_linear(b)], [b for b in trace.bound_symbols if is_te_backward(b)]


def has_the_flags_of_the_wanted_gradients(trace: TraceCtx) -> bool:
    forward, backward = both_directions(trace)
    expected = [(True, False, False), (True, True, False)] * 2
    return flags(forward) == expected and flags(backward) == expected[::-1]


def saves_what_the_flags_need(trace: TraceCtx) -> bool:
    forward, backward = both_directions(trace)
    return [len(b.output[1]) for b in forward] == [2, 4, 2, 4] and [len(b.args[4]) for b in backward] == [4, 2, 4, 2]


def syncs_once_last_before_the_return(trace: TraceCtx) -> bool:
    at = [i for i, b in enumerate(trace.bound_symbols) if b.sym == te_sync_fp8_meta_bwd]
    return at == [len(trace.bound_symbols) - 2] and trace.bound_symbols[-1].sym.id is prims.PrimIDs.RETURN


def numbers_linears_and_their_contexts_in_order(trace: TraceCtx) -> bool:
    forward, backward = both_directions(trace)
    contexts = [f"ctx_te_{n}" for n in range(4)]
    return (
        [b.sym.name for b in forward] == [f"te_linear_{n}" for n in range(4)]
        and [ctx_of(b).name for b in forward] == contexts
        and [ctx_of(b).name for b in backward] == contexts[::-1]
    )


def recomputes_linears_as_their_first_run_did(trace: TraceCtx) -> bool:
    contexts = {ctx_of(b).name: b.sym.name for b in trace.bound_symbols if is_te_linear(b) and ctx_of(b) is not None}
    copies = [b for b in trace.bound_symbols if is_te_recompute(b)]
    # thunder recomputes what backward needs again: all linears of the region but the last.
    expected = {"te_recompute_linear_1": "te_linear_1", "te_recompute_linear_2": "te_linear_2"}
    return {b.sym.name: contexts[b.args[3].name] for b in copies} == expected


def computes_nothing_for_a_gradient_of_zeros(trace: TraceCtx) -> bool:
    forward, backward = both_directions(trace)
    gradients = trace.bound_symbols[-1].args[0]["output"]
    return flags(forward) == [(False, False, False), (True, True, True)] and sum(g is not None for g in gradients) == 3


def casts_nothing_there_and_back(trace: TraceCtx) -> bool:
    widened = {}
    for bsym in trace.bound_symbols:
        source = cast_from(bsym)
        if source is not None and widened.get(source.name) == bsym.output.dtype:
            return False
        if source is not None and bsym.output.dtype == dtypes.float32:
            widened[bsym.output.name] = source.dtype
    return True


def multiplies_small_tensors_by_numbers(trace: TraceCtx) -> bool:
    sizes = [b.output.numel for b in trace.bound_symbols if scaled_by(b) is not None]
    # Three adapters of rank 8: their inputs (32 x 8), of which two are one product's, and the gradients of these. The
    # gradients of the second matrices (96 x 8, 64 x 8) read what was multiplied.
    return sorted(sizes) == [256] * 4 + [512]


def adds_up_in_gemms(trace: TraceCtx) -> bool:
    forward, backward = both_directions(trace)
    adapters = [b for b in trace.bound_symbols if is_matmul(b) and tuple(b.output.shape) == (32, 64)]
    # Those of gate and up are one product.
    return all("accumulate" in b.kwargs for b in (*forward, *backward)) and len(adapters) == 1


def reads_each_tensor_once_for_its_adapters(trace: TraceCtx) -> bool:
    inputs = [b.args[0].name for b in trace.bound_symbols if is_plain_linear(b)]
    shapes = [tuple(b.output.shape) for b in trace.bound_symbols if is_matmul(b)]
    # The gradients of gate's and up's first matrices, of rank 8.
    return len(inputs) == len(set(inputs)) and shapes.count((16, 64)) == 1 and shapes.count((8, 64)) == 0


def quantizes_each_input_once(trace: TraceCtx) -> bool:
    inputs = [b.args[0].name for b in trace.bound_symbols if is_te_quantize(b)]
    forward, _ = both_directions(trace)
    inputs += [b.args[0].name for b in forward if "quantized_input" not in b.kwargs]
    return len(inputs) == len(set(inputs)) == 2


def saves_nothing_that_is_cheap_to_compute(trace: TraceCtx) -> bool:
    forward = {
        out.name: b for b in trace.bound_symbols if BoundSymbolTag.BACKWARD not in b.tags for out in b.flat_proxy_outs
    }
    backward = [
        b
        for b in trace.bound_symbols
        if BoundSymbolTag.BACKWARD in b.tags and b.sym.id is not prims.PrimIDs.GET_GRAD  # names an output
    ]
    saved = {p.name for b in backward for p in b.flat_proxy_args if p.name in forward}

    def is_there(name: str) -> bool:  # in backward, or made there by pointwise code
        return name in saved or is_cheap(name)

    def is_cheap(name: str) -> bool:
        made = forward.get(name)
        return made is None or (is_pointwise(made) and all(is_there(p.name) for p in made.flat_proxy_args))

    return not any(map(is_cheap, saved))


def computes_an_activation_where_a_kernel_reads_what_it_is_made_of(trace: TraceCtx) -> bool:
    down, up, _ = [i for i, b in enumerate(trace.bound_symbols) if is_te_backward(b)]
    products = products_in_backward(trace, 8, 96)
    return len(products) == 1 and down < products[0] < up  # of down's first matrix, from the product of gate and up


def quantizes_where_a_fuser_computes(trace: TraceCtx) -> bool:
    forward, backward = both_directions(trace)
    # The fuser computes down's input, and the gradients of gate's and up's outputs; the rest comes from the caller.
    quantized = [b.args[0].dtype == dtypes.uint8 for b in forward], [b.args[5].dtype == dtypes.uint8 for b in backward]
    return quantized == ([False, False, True], [False, True, True])


def runs_linears_of_one_tensor_one_behind_the_other(trace: TraceCtx) -> bool:
    gate, up, _ = [i for i, b in enumerate(trace.bound_symbols) if is_te_linear(b)]
    return up == gate + 1


def checks_last_that_no_graph_was_asked_for(trace: TraceCtx) -> bool:
    return trace.bound_symbols[-2].sym == te_differentiable_once


GUARANTEES = {
    needed_gradients: has_the_flags_of_the_wanted_gradients,
    fewest_saved_tensors: saves_what_the_flags_need,
    fp8_meta_sync: syncs_once_last_before_the_return,
    number_linears: numbers_linears_and_their_contexts_in_order,
    recomputed_linears: recomputes_linears_as_their_first_run_did,
    zero_gradients: computes_nothing_for_a_gradient_of_zeros,
    redundant_casts: casts_nothing_there_and_back,
    small_scalings: multiplies_small_tensors_by_numbers,
    sums_in_gemms: adds_up_in_gemms,
    merged_adapters: reads_each_tensor_once_for_its_adapters,
    shared_inputs: quantizes_each_input_once,
    recomputed_activations: saves_nothing_that_is_cheap_to_compute,
    waiting_gradients: computes_an_activation_where_a_kernel_reads_what_it_is_made_of,
    fused_quantizations: quantizes_where_a_fuser_computes,
    adjacent_linears: runs_linears_of_one_tensor_one_behind_the_other,
    differentiable_once: checks_last_that_no_graph_was_asked_for,
}
PROGRAMS = {
    recomputed_linears: a_checkpointed_region,
    zero_gradients: a_detached_value_written_to_in_place,
    redundant_casts: lora_mlp_in_bfloat16,
    small_scalings: lora_mlp_in_bfloat16,
    sums_in_gemms: lora_mlp_in_bfloat16,
    merged_adapters: lora_mlp_in_bfloat16,
    shared_inputs: lora_mlp_in_bfloat16,
    recomputed_activations: lora_mlp_in_bfloat16,
    waiting_gradients: lora_mlp_in_bfloat16,
    fused_quantizations: lora_mlp_in_bfloat16,
    adjacent_linears: lora_mlp_in_bfloat16,
    differentiable_once: only_the_last_bias_trained,
}


@pytest.mark.parametrize("run", PASSES, ids=lambda run: run.__name__)
def test_the_pass_gives_its_guarantee_and_nothing_else_does(run) -> None:
    leave_something_to_a_fuser = (recomputed_activations, waiting_gradients, fused_quantizations, adjacent_linears)
    behind = [torch_compile_ex] if run in leave_something_to_a_fuser else []
    before, _ = joint_trace(*PROGRAMS.get(run, every_even_linear_frozen)(), behind=behind)
    assert GUARANTEES[run](rewritten(before))
    assert not GUARANTEES[run](rewritten(before, without=run))


@pytest.mark.parametrize("behind", ((), (torch_compile_ex,)), ids=("torch", "fuser"))
@pytest.mark.parametrize("program", TRAINING, ids=lambda p: p.__name__)
def test_after_each_pass_everything_is_made_before_it_is_read(program, behind) -> None:
    trace, _ = joint_trace(*program(), behind=behind)
    for run in PASSES:
        trace = run(trace)
        assert makes_everything_before_it_is_read(trace), run.__name__


@pytest.mark.parametrize("program", TRAINING, ids=lambda p: p.__name__)
def test_passes_leave_alone_what_they_have_rewritten(program) -> None:
    _, after = joint_trace(*program())
    for run in (needed_gradients, fewest_saved_tensors):
        again = run(after)
        assert [b.python(0) for b in again.bound_symbols] == [b.python(0) for b in after.bound_symbols]


@pytest.mark.parametrize("lie", (True, False))
def test_gradients_are_found_whatever_intermediate_proxies_say_of_requires_grad(lie) -> None:
    before, _ = joint_trace(*every_even_linear_frozen())
    for bsym in before.bound_symbols:
        for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs):
            if isinstance(proxy, TensorProxy):
                proxy._requires_grad = lie
    assert has_the_flags_of_the_wanted_gradients(rewritten(before))


def test_what_only_fed_a_dropped_gradient_is_dropped_with_it() -> None:
    before, after = joint_trace(*only_biases_trained())
    forward, backward = both_directions(after)
    assert flags(forward) == [(False, False, True), (True, False, True), (True, False, True)]
    names = {o.name for b in after.bound_symbols for o in b.flat_proxy_outs}
    assert all(p.name in names or p.name in {a.name for a in after.args} for b in backward for p in b.flat_proxy_args)
    assert len(after.bound_symbols) <= len(before.bound_symbols) + 1  # the sync, which checks for a graph too


def test_no_gradient_is_quantized_and_none_is_synced_where_only_the_last_bias_is_trained() -> None:
    _, after = joint_trace(*only_the_last_bias_trained())
    forward, backward = both_directions(after)
    assert flags(forward) == [(False, False, False), (False, False, True)]
    assert [b.args[4] for b in backward] == [()]
    assert not any(b.sym == te_sync_fp8_meta_bwd for b in after.bound_symbols)


def test_two_uses_of_a_weight_are_two_linears() -> None:
    _, after = joint_trace(*one_weight_in_two_linears())
    forward, _ = both_directions(after)
    assert [b.sym.name for b in forward] == ["te_linear_0", "te_linear_1"]
    assert forward[0].args[1].name == forward[1].args[1].name
