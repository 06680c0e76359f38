"""Trace passes: functions from a trace to a trace, that know symbols and liveness and no backend."""

from thunder_te_exec.passes.fewest_saved_tensors import fewest_saved_tensors
from thunder_te_exec.passes.fp8_meta_sync import fp8_meta_sync
from thunder_te_exec.passes.needed_gradients import needed_gradients
from thunder_te_exec.passes.number_linears import number_linears
from thunder_te_exec.passes.recomputed_linears import recomputed_linears
from thunder_te_exec.passes.zero_gradients import zero_gradients

__all__ = [
    "PASSES",
    "fewest_saved_tensors",
    "fp8_meta_sync",
    "needed_gradients",
    "number_linears",
    "recomputed_linears",
    "zero_gradients",
]

#: What runs on a joint (forward and backward) trace or on an inference trace, in this order.
PASSES = (
    zero_gradients,
    needed_gradients,
    fewest_saved_tensors,
    recomputed_linears,
    fp8_meta_sync,
    number_linears,
)
