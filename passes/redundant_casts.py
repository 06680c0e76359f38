"""Use a tensor itself where it was cast to a wider type and back.

thunder computes in float32 what it differentiates in bfloat16, and casts at each step. Before::

    g1 = prims.convert_element_type(g0, dtypes.float32)
    g2 = prims.convert_element_type(g1, dtypes.bfloat16)
    g3 = prims.convert_element_type(g1, dtypes.bfloat16)
    (gx, _, _) = te_functional_linear_backward(..., g2, ...)
    gb = matmul(g3, b)

After, where ``g0`` is bfloat16::

    (gx, _, _) = te_functional_linear_backward(..., g0, ...)
    gb = matmul(g0, b)

Not a bit changes. Without the pass a fuser writes each of the copies; and other passes see that what was copies is one
tensor. A forward's result stays a tensor of its own.
"""

from __future__ import annotations

from thunder_te_exec.passes.patterns import cast_from, widened_from
from thunder_te_exec.passes.rewrite import joint_return, return_of, with_bound_symbols, without_dead_symbols

from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.trace import TraceCtx

__all__ = ["redundant_casts"]


def redundant_casts(trace: TraceCtx) -> TraceCtx:
    """Replace the result of a cast that undoes a widening one by what was widened."""
    kept = _results_of_forward(trace)
    swaps: dict[Variable, Proxy] = {}
    widened: dict[str, TensorProxy] = {}
    bound_symbols = []
    for bsym in trace.bound_symbols:
        bsym = bsym.from_bsym_swap_proxies(swaps)
        source = cast_from(bsym)
        if source is not None:
            original = widened.get(source.name)
            if original is not None and original.dtype == bsym.output.dtype and bsym.output.name not in kept:
                swaps[variableify(bsym.output)] = original
                continue
            if widened_from(bsym) is not None:
                widened[bsym.output.name] = source
        bound_symbols.append(bsym)
    if not swaps:
        return trace
    return without_dead_symbols(with_bound_symbols(trace, bound_symbols, "Redundant casts"), "Redundant casts")


def _results_of_forward(trace: TraceCtx) -> set[str]:
    """Names of what the caller of the forward gets; gradients are not among them."""
    joint = joint_return(trace)
    results = return_of(trace).args if joint is None else joint["fw_flat_out"]
    return {p.name for p in tree_flatten(results)[0] if isinstance(p, Proxy)}
