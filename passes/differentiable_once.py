"""Make a backward that was asked for a graph of its gradients raise: there is none.

What thunder differentiates is differentiable once; with ``create_graph=True`` it gives gradients without a graph, so
that gradients of them are missing, silently. Before::

    gx = mul(g, w)
    return {'output': (gx, None), ...}

After::

    gx = mul(g, w)
    te_differentiable_once()
    return {'output': (gx, None), ...}

``te_sync_fp8_meta_bwd`` does the same beside its own work: where it stands, nothing is added.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import insert_before_return, joint_return, with_bound_symbols
from thunder_te_exec.symbols import te_differentiable_once, te_sync_fp8_meta_bwd

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx

__all__ = ["differentiable_once"]


def differentiable_once(trace: TraceCtx) -> TraceCtx:
    """Add ``te_differentiable_once`` last before the return of a trace that returns gradients."""
    returned = joint_return(trace)
    if returned is None or not any(isinstance(g, Proxy) for g in returned["output"]):
        return trace
    if any(b.sym in (te_sync_fp8_meta_bwd, te_differentiable_once) for b in trace.bound_symbols):
        return trace
    check = te_differentiable_once.bind(output=None)
    check.tags.add(BoundSymbolTag.BACKWARD)
    return with_bound_symbols(trace, insert_before_return(trace, check), "Differentiable once")
