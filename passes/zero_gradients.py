"""Return None for gradients that are zero because nothing flows there, and don't add such gradients.

thunder makes a gradient of zeros where a value of the forward has none, as behind a ``detach`` that is written to.
Before::

    g = prims.get_grad(y)
    z = torch.zeros(32, 32)
    (gx1, gw1, _) = te_functional_linear_backward(..., z, ...)
    (gx2, gw2, _) = te_functional_linear_backward(..., g, ...)
    gx = torch.add(gx1, gx2)
    return {'output': (gx, gw1, gw2), ...}

After; what computed ``gx1`` and ``gw1`` is dead now, and the next pass drops it::

    return {'output': (gx2, None, gw2), ...}

Zero is what thunder makes of zeros, and what symbols that keep zeros compute from it: a linear's backward, products,
sums, changes of shape or type. That a gradient does not depend on the outputs' gradients is no sign: a user's
``autograd.Function`` may return what it likes. Eager torch gives None where no gradient flows.
"""

from __future__ import annotations

from thunder_te_exec.passes.patterns import adds, symbol_ids
from thunder_te_exec.passes.rewrite import joint_return, with_bound_symbols
from thunder_te_exec.symbols import is_te_backward

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

__all__ = ["zero_gradients"]


_ZEROS = symbol_ids("zeros")
#: Zero where any operand is.
_PRODUCTS = symbol_ids("mul", "matmul", primitives=(prims.mul, prims.matmul))
#: Zero where their one operand is.
_KEEP_ZEROS = symbol_ids(
    *("neg", "sum", "to", "reshape", "permute", "transpose", "expand", "squeeze", "unsqueeze", "contiguous"),
    primitives=(
        prims.neg,
        prims.sum,
        prims.convert_element_type,
        prims.reshape,
        prims.transpose,
        prims.broadcast_in_dim,
        prims.squeeze,
        prims.shallow_copy,
    ),
)


def zero_gradients(trace: TraceCtx) -> TraceCtx:
    """Take gradients that are known to be zero out of sums with others, and out of the return."""
    if joint_return(trace) is None:
        return trace  # what is returned are the outputs
    zeros: set[str] = set()
    swaps: dict[Variable, Proxy] = {}
    bound_symbols = []
    for bsym in trace.bound_symbols:
        bsym = bsym.from_bsym_swap_proxies(swaps)
        if bsym.sym.id is prims.PrimIDs.RETURN:
            bound_symbols.append(_without_zero_gradients(bsym, zeros))
            continue
        if _is_zero(bsym, zeros):
            zeros.update(o.name for o in bsym.flat_proxy_outs)
        summand = _only_summand(bsym, zeros)
        if summand is not None:
            swaps[variableify(bsym.output)] = summand
        else:
            bound_symbols.append(bsym)
    return with_bound_symbols(trace, bound_symbols, "Zero gradients")


def _is_zero(bsym: BoundSymbol, zeros: set[str]) -> bool:
    if BoundSymbolTag.BACKWARD not in bsym.tags:
        return False
    if is_te_backward(bsym):
        return bsym.args[5].name in zeros
    if bsym.sym.id in _ZEROS:
        return True
    operands = [p.name in zeros for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    if bsym.sym.id in _PRODUCTS:
        return any(operands)
    if adds(bsym):
        return operands == [True, True]  # a number may have been added
    return bsym.sym.id in _KEEP_ZEROS and operands == [True]


def _without_zero_gradients(bsym: BoundSymbol, zeros: set[str]) -> BoundSymbol:
    returned = bsym.args[0]
    grads = tuple(None if isinstance(g, Proxy) and g.name in zeros else g for g in returned["output"])
    return bsym.from_bsym(args=({**returned, "output": grads},))


def _only_summand(bsym: BoundSymbol, zeros: set[str]) -> TensorProxy | None:
    """Of a sum of two gradients one of which is zero, the other, where it has the sum's type and shape."""
    if BoundSymbolTag.BACKWARD not in bsym.tags or not adds(bsym):
        return None
    tensors = [p for p in bsym.args if isinstance(p, TensorProxy)]
    others = [p for p in tensors if p.name not in zeros]
    if len(tensors) != 2 or len(others) != 1 or bsym.kwargs.get("alpha") not in (None, 1):
        return None
    (other,), out = others, bsym.output
    return other if (tuple(other.shape), other.dtype) == (tuple(out.shape), out.dtype) else None
