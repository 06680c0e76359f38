"""Trace passes: functions from a trace to a trace, that know symbols and liveness and no backend."""

from thunder_te_exec.passes.adjacent_linears import adjacent_linears
from thunder_te_exec.passes.differentiable_once import differentiable_once
from thunder_te_exec.passes.fewest_saved_tensors import fewest_saved_tensors
from thunder_te_exec.passes.fp8_meta_sync import fp8_meta_sync
from thunder_te_exec.passes.fused_quantizations import fused_quantizations
from thunder_te_exec.passes.merged_adapters import merged_adapters
from thunder_te_exec.passes.needed_gradients import needed_gradients
from thunder_te_exec.passes.number_linears import number_linears
from thunder_te_exec.passes.recomputed_activations import recomputed_activations
from thunder_te_exec.passes.recomputed_linears import recomputed_linears
from thunder_te_exec.passes.redundant_casts import redundant_casts
from thunder_te_exec.passes.shared_inputs import shared_inputs
from thunder_te_exec.passes.small_scalings import small_scalings
from thunder_te_exec.passes.sums_in_gemms import sums_in_gemms
from thunder_te_exec.passes.waiting_gradients import waiting_gradients
from thunder_te_exec.passes.zero_gradients import zero_gradients

__all__ = [
    "OPTIMIZATIONS",
    "PASSES",
    "adjacent_linears",
    "differentiable_once",
    "fewest_saved_tensors",
    "fp8_meta_sync",
    "fused_quantizations",
    "merged_adapters",
    "needed_gradients",
    "number_linears",
    "recomputed_activations",
    "recomputed_linears",
    "redundant_casts",
    "shared_inputs",
    "small_scalings",
    "sums_in_gemms",
    "waiting_gradients",
    "zero_gradients",
]

#: Passes that rewrite other symbols than ours. They run where a linear is claimed and nothing is written to in place:
#: they read tensors elsewhere than the program does.
OPTIMIZATIONS = (
    redundant_casts,
    small_scalings,
    sums_in_gemms,
    merged_adapters,
    shared_inputs,
    recomputed_activations,
    waiting_gradients,
    fused_quantizations,
    adjacent_linears,
)

#: What runs on a joint (forward and backward) trace or on an inference trace, in this order.
PASSES = (
    zero_gradients,
    needed_gradients,
    fewest_saved_tensors,
    recomputed_linears,
    *OPTIMIZATIONS,
    fp8_meta_sync,
    differentiable_once,
    number_linears,
)
