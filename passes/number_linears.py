"""Give every claimed linear of a trace a name of its own, counted in order of appearance.

Before::

    (y, (s2, s3), ctx_te_17) = te_linear(x, w0, None, ...)
    (z, (s6, s7), ctx_te_23) = te_linear(y, w1, None, ...)

After::

    (y, (s2, s3), ctx_te_0) = te_linear_0(x, w0, None, ...)
    (z, (s6, s7), ctx_te_1) = te_linear_1(y, w1, None, ...)

thunder collects what symbols call by their names, so a linear that keeps FP8 state needs a name of its own in its
trace, as do a ``te_quantize_input`` and a ``te_input_scale``. ``te_recompute_linear`` gets the number of the first run
that it reads. Numbering comes last: thunder runs the lowering before it more than once, and what is given there is
neither dense nor stable.
"""

from __future__ import annotations

from dataclasses import replace

from thunder_te_exec.passes.rewrite import free_name, with_bound_symbols
from thunder_te_exec.symbols import ctx_of, is_te_input_scale, is_te_linear, is_te_quantize, is_te_recompute

from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["number_linears"]


def number_linears(trace: TraceCtx) -> TraceCtx:
    """Rename ``te_linear`` to ``te_linear_N`` and its context to ``ctx_te_N``, and its recomputation likewise."""
    new = with_bound_symbols(trace, (), "Numbering of FP8 linears")
    count = quantizations = scales = 0
    number_of_ctx: dict[str, int] = {}
    renamed: dict[Variable, Proxy] = {}
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if is_te_linear(bsym):
                n, count = count, count + 1
                bsym = _numbered(bsym, n, f"ctx_te_{n}", new, renamed)
                if ctx_of(bsym) is not None:
                    number_of_ctx[ctx_of(bsym).name] = n
            elif is_te_quantize(bsym):
                bsym = bsym.from_bsym(sym=_named(bsym.sym, quantizations))
                quantizations += 1
            elif is_te_input_scale(bsym):
                bsym = bsym.from_bsym(sym=_named(bsym.sym, scales))
                scales += 1
            elif is_te_recompute(bsym):
                n = number_of_ctx[bsym.args[3].name]
                bsym = _numbered(bsym, n, f"bw_ctx_te_{n}", new, renamed)
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(renamed))
    return new


def _numbered(bsym: BoundSymbol, n: int, ctx_name: str, trace: TraceCtx, renamed: dict[Variable, Proxy]) -> BoundSymbol:
    ctx = ctx_of(bsym)
    if ctx is not None:
        renamed[variableify(ctx)] = ctx.replace(name=free_name(trace, ctx_name))
    return bsym.from_bsym(sym=_named(bsym.sym, n))


def _named(symbol: Symbol, n: int) -> Symbol:
    return replace(symbol, name=f"{symbol.name}_{n}", _hash=None)
