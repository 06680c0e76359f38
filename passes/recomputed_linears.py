"""Run a linear that is recomputed in backward with what its first run was quantized with.

Activation checkpointing puts a copy of the region's symbols into backward. Before::

    (y, (), _) = te_linear(x, w, None, input_requires_grad=False, weight_requires_grad=False, ...)
    ...
    (bw_y, (s0, s1), ctx) = te_linear(x, w, None, input_requires_grad=False, weight_requires_grad=True, ...)

After::

    (y, (), first_run) = te_linear(x, w, None, input_requires_grad=False, weight_requires_grad=False, ...)
    ...
    (bw_y, (s0, s1), ctx) = te_recompute_linear(x, w, None, first_run, input_requires_grad=False, ...)

By then the forward has moved the scales of delayed scaling, and a copy that used the new ones would compute gradients
at another point than the loss. The copy takes its first run's scales, through that run's context, and records no amax.
"""

from __future__ import annotations

from dataclasses import replace

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import ctx_of, is_te_linear, te_recompute_linear

from thunder.core.proxies import AnyProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["recomputed_linears"]


def recomputed_linears(trace: TraceCtx) -> TraceCtx:
    """Replace each recomputed ``te_linear`` by ``te_recompute_linear``, which reads the context of its first run."""
    linears = [b for b in trace.bound_symbols if is_te_linear(b)]
    copies = [b for b in linears if BoundSymbolTag.BACKWARD in b.tags]
    if not copies:
        return trace
    first_runs = {b.output[0].name: b for b in linears if BoundSymbolTag.BACKWARD not in b.tags}
    # thunder names the outputs of a copy "bw_" and the name of the first run's output.
    first_run_of = {id(copy): first_runs[copy.output[0].name.removeprefix("bw_")] for copy in copies}

    new = with_bound_symbols(trace, (), "Recomputed FP8 linears")
    rewritten: dict[int, BoundSymbol] = {}
    with tracectx(new):
        for first in first_run_of.values():
            if id(first) not in rewritten:
                out, saved, ctx = first.output
                ctx = ctx if ctx is not None else AnyProxy(object(), prefix="ctx_te")
                rewritten[id(first)] = first.from_bsym(output=(out, saved, ctx))
    for copy in copies:
        first_run = ctx_of(rewritten[id(first_run_of[id(copy)])])
        symbol = replace(
            te_recompute_linear, executor=copy.sym.executor, _bind_postprocess=copy.sym._bind_postprocess, _hash=None
        )
        rewritten[id(copy)] = copy.from_bsym(sym=symbol, args=(*copy.args, first_run))
    new.bound_symbols = [rewritten.get(id(b), b) for b in trace.bound_symbols]
    return new
