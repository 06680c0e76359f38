"""Give every claimed linear of a trace a name of its own, counted in order of appearance.

Before::

    (y, (s2, s3), ctx_te_17) = te_linear(x, w0, None, ...)
    (z, (s6, s7), ctx_te_23) = te_linear(y, w1, None, ...)

After::

    (y, (s2, s3), ctx_te_0) = te_linear_0(x, w0, None, ...)
    (z, (s6, s7), ctx_te_1) = te_linear_1(y, w1, None, ...)

thunder collects what symbols call by their names, so a linear that keeps FP8 state needs a name of its own in its
trace. A linear that is recomputed in backward (activation checkpointing) keeps the number of its first run. Numbering
comes last: thunder runs the lowering before it more than once, and what is given there is neither dense nor stable.
"""

from __future__ import annotations

from dataclasses import replace

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import ctx_of, is_te_linear

from thunder.core.proxies import Proxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["number_linears"]


def number_linears(trace: TraceCtx) -> TraceCtx:
    """Rename ``te_linear`` to ``te_linear_N`` and its context to ``ctx_te_N``."""
    new = with_bound_symbols(trace, (), "Numbering of FP8 linears")
    numbers: dict[str, int] = {}
    renamed: dict[Variable, Proxy] = {}
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if is_te_linear(bsym):
                n = _number(bsym, numbers)
                ctx = ctx_of(bsym)
                if ctx is not None:
                    renamed[variableify(ctx)] = ctx.replace(name=_free_name(new, f"ctx_te_{n}"))
                bsym = bsym.from_bsym(sym=replace(bsym.sym, name=f"te_linear_{n}", _hash=None))
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(renamed))
    return new


def _number(bsym: BoundSymbol, numbers: dict[str, int]) -> int:
    out = bsym.output[0].name
    if BoundSymbolTag.BACKWARD in bsym.tags:
        # thunder names the outputs of a recomputation "bw_" and the name of the first run's output.
        first_run = numbers.get(out.removeprefix("bw_"))
        if first_run is not None:
            return first_run
    numbers[out] = len(numbers)
    return numbers[out]


def _free_name(trace: TraceCtx, name: str) -> str:
    while trace.has_name(name):
        name += "_"
    return name
