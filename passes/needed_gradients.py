"""Compute only the gradients that somebody uses.

Before (``w0`` is frozen, so the joint trace returns None for it)::

    (y, (s0, s1, s2, s3), ctx) = te_linear(x, w0, None, input_requires_grad=True, weight_requires_grad=True, ...)
    (gx, gw, _) = te_functional_linear_backward(..., ctx, (s0, s1, s2, s3), gy, ..., weight_requires_grad=True, ...)
    return {'output': (gx, None), ...}

After::

    (y, (s0, s1, s2, s3), ctx) = te_linear(x, w0, None, input_requires_grad=True, weight_requires_grad=False, ...)
    (gx, _, _) = te_functional_linear_backward(..., ctx, (s0, s1, s2, s3), gy, ..., weight_requires_grad=False, ...)
    return {'output': (gx, None), ...}

A gradient is wanted when a symbol that is itself needed reads it, or the trace returns it; nothing else is asked, in
particular not ``requires_grad`` of any proxy, which thunder does not carry along. A backward symbol none of whose
gradients is wanted is removed, and with it what only fed it.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import liveness_order, with_bound_symbols
from thunder_te_exec.symbols import Wanted, ctx_of, is_te_backward, is_te_linear

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

__all__ = ["needed_gradients"]


def needed_gradients(trace: TraceCtx) -> TraceCtx:
    """Set the ``*_requires_grad`` flags of claimed linears, in both directions, by liveness from the trace's return."""
    wanted_of_ctx: dict[str, Wanted] = {}

    def rewrite(bsym: BoundSymbol, needed: set[str]) -> BoundSymbol:
        if is_te_backward(bsym):
            wanted = Wanted(*(isinstance(g, Proxy) and g.name in needed for g in bsym.output))
            wanted_of_ctx[ctx_of(bsym).name] = wanted
            grads = tuple(g if w else None for g, w in zip(bsym.output, wanted))
            return bsym.from_bsym(kwargs={**bsym.kwargs, **wanted.kwargs()}, output=grads)
        if is_te_linear(bsym):
            ctx = ctx_of(bsym)
            wanted = wanted_of_ctx.get(ctx.name, Wanted(False, False, False)) if ctx is not None else Wanted.of(bsym)
            return bsym.from_bsym(kwargs={**bsym.kwargs, **wanted.kwargs()})
        return bsym

    return with_bound_symbols(trace, liveness_order(trace, rewrite), "Needed gradients of FP8 linears")
