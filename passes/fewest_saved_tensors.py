"""Save for backward only the operands that the wanted gradients read.

Before::

    (y, (s0, s1, s2, s3), ctx) = te_linear(x, w, None, input_requires_grad=True, weight_requires_grad=False, ...)
    (gx, _, _) = te_functional_linear_backward(..., ctx, (s0, s1, s2, s3), gy, ...)

After: dgrad reads the weight, so the input's column-wise copy and its scale, ``s0`` and ``s1``, go::

    (y, (s2, s3), ctx) = te_linear(x, w, None, input_requires_grad=True, weight_requires_grad=False, ...)
    (gx, _, _) = te_functional_linear_backward(..., ctx, (s2, s3), gy, ...)

A forward whose context no backward reads loses all of them and the context: ``(y, (), _) = te_linear(...)``, as does
the first run of a linear that is recomputed in backward. thunder saves what the backward part of the trace reads, so
what is dropped here is neither quantized nor kept.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import liveness_order, with_bound_symbols
from thunder_te_exec.symbols import Wanted, is_te_backward, is_te_linear, saved_operands

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

__all__ = ["fewest_saved_tensors"]


def fewest_saved_tensors(trace: TraceCtx) -> TraceCtx:
    """Drop from claimed linears, in both directions, every saved tensor that the set flags do not need."""

    def rewrite(bsym: BoundSymbol, needed: set[str]) -> BoundSymbol:
        if is_te_backward(bsym):
            return _without_unread_operands(bsym)
        if is_te_linear(bsym):
            out, saved, ctx = bsym.output
            read = ctx is not None and ctx.name in needed
            kept = tuple(s for s in saved if s.name in needed)
            return bsym.from_bsym(output=(out, kept, ctx if read else None))
        return bsym

    return with_bound_symbols(trace, liveness_order(trace, rewrite), "Fewest tensors saved by FP8 linears")


def _without_unread_operands(bsym: BoundSymbol) -> BoundSymbol:
    *shapes, ctx, saved, grad_output = bsym.args
    if len(saved) < 4:
        return bsym
    return bsym.from_bsym(args=(*shapes, ctx, saved_operands(saved, Wanted.of(bsym)), grad_output))
