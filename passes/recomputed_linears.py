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

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import ctx_of, is_te_linear, of_the_executor_of, te_recompute_linear

from thunder.core.proxies import AnyProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["recomputed_linears"]


def recomputed_linears(trace: TraceCtx) -> TraceCtx:
    """Replace each recomputed ``te_linear`` by ``te_recompute_linear``, which reads the context of its first run."""
    first_run_of = _pair_with_first_runs([b for b in trace.bound_symbols if is_te_linear(b)])
    if not first_run_of:
        return trace
    new = with_bound_symbols(trace, (), "Recomputed FP8 linears")
    rewritten: dict[int, BoundSymbol] = {}
    with tracectx(new):
        for copy, first in first_run_of.values():
            if id(first) not in rewritten:
                out, saved, ctx = first.output
                ctx = ctx if ctx is not None else AnyProxy(object(), prefix="ctx_te")
                rewritten[id(first)] = first.from_bsym(output=(out, saved, ctx))
            symbol = of_the_executor_of(copy, te_recompute_linear)
            first_run = ctx_of(rewritten[id(first)])
            rewritten[id(copy)] = copy.from_bsym(sym=symbol, args=(*copy.args, first_run))
    new.bound_symbols = [rewritten.get(id(b), b) for b in trace.bound_symbols]
    return new


def _pair_with_first_runs(linears: list[BoundSymbol]) -> dict[int, tuple[BoundSymbol, BoundSymbol]]:
    """By id of the copy: the copy and its first run.

    thunder prefixes the names of a copy's outputs with "bw_". A linear that needs no gradient is lowered after copying
    and has names of its own: such copies are those of the linears of their weight, in order.
    """
    first_runs = {b.output[0].name: b for b in linears if BoundSymbolTag.BACKWARD not in b.tags}
    by_weight: dict[str, list[BoundSymbol]] = {}
    for first in first_runs.values():
        if BoundSymbolTag.RECOMPUTE_IN_BACKWARD in first.tags:
            by_weight.setdefault(first.args[1].name, []).append(first)
    pairs = {}
    for copy in linears:
        if BoundSymbolTag.BACKWARD not in copy.tags:
            continue
        first = first_runs.get(copy.output[0].name.removeprefix("bw_"))
        same_weight = by_weight.get(copy.args[1].name, [])
        if first is None and same_weight:
            first = same_weight.pop(0)
        if first is not None:
            pairs[id(copy)] = (copy, first)
    return pairs
