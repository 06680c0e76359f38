"""High-precision reads of weights that are held in FP8 alone.

Before, the linear not being claimed, ``w`` being such a weight::

    y = linear(x, w)
    ...
    gx = matmul(gy, w)

After::

    w1 = te_high_precision(w)
    y = linear(x, w1)
    ...
    w2 = te_high_precision(w)
    gx = matmul(gy, w2)

``w1`` is an ordinary tensor, which every executor takes; a fuser would otherwise be given a tensor of another class.
Backward makes it again, so that it is not saved. Claimed linears read the weight as it is.
"""

from __future__ import annotations

from collections.abc import Container

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import is_te_linear, is_te_recompute

from thunder.core import prims
from thunder.core.proxies import TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["high_precision_weights"]


def high_precision_weights(trace: TraceCtx, held: Container[str], symbol: Symbol) -> TraceCtx:
    """Put a ``te_high_precision``, which is ``symbol``, before what first reads a weight that is named in ``held``."""
    new = with_bound_symbols(trace, (), "High-precision reads of FP8 weights")
    made: dict[bool, dict[Variable, TensorProxy]] = {False: {}, True: {}}
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if not (is_te_linear(bsym) or is_te_recompute(bsym) or bsym.sym.id is prims.PrimIDs.RETURN):
                is_backward = BoundSymbolTag.BACKWARD in bsym.tags
                weights = made[is_backward]
                for weight in bsym.flat_proxy_args:
                    if weight.name in held and variableify(weight) not in weights:
                        new.bound_symbols.append(_read(weight, symbol, is_backward))
                        weights[variableify(weight)] = new.bound_symbols[-1].output
                bsym = bsym.from_bsym_swap_proxies(weights, skip_output=True)
            new.bound_symbols.append(bsym)
    return new


def _read(weight: TensorProxy, symbol: Symbol, is_backward: bool) -> BoundSymbol:
    read = symbol.bind(weight, output=TensorProxy(like=weight, requires_grad=False))
    if is_backward:
        read.tags.add(BoundSymbolTag.BACKWARD)
    return read
