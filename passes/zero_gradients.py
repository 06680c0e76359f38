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

Gradients are linear in the gradients of the outputs (``get_grad``). So one that depends on none of these is zero, and
eager torch gives None for it.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import is_te_backward

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx
from thunder.executors.torchex import ex as torch_ex

__all__ = ["zero_gradients"]

_ADDS = (ltorch.add, torch_ex.opmap["add"])
_ZEROS = (ltorch.zeros, torch_ex.opmap["zeros"])


def zero_gradients(trace: TraceCtx) -> TraceCtx:
    """Take gradients that depend on no output's gradient out of sums with others, and out of the return."""
    returned = trace.bound_symbols[-1].args
    if not (returned and isinstance(returned[0], dict) and "fw_flat_out" in returned[0]):
        return trace  # no joint trace: what is returned are the outputs
    flows: set[str] = set()  # names of what depends on a gradient of an output
    zeros: set[str] = set()  # names of gradients that do not
    swaps: dict[Variable, Proxy] = {}
    bound_symbols = []
    for bsym in trace.bound_symbols:
        bsym = bsym.from_bsym_swap_proxies(swaps)
        if bsym.sym.id is prims.PrimIDs.RETURN:
            bound_symbols.append(_without_zero_gradients(bsym, flows))
            continue
        if bsym.sym == prims.get_grad or any(p.name in flows for p in bsym.flat_proxy_args):
            flows.update(o.name for o in bsym.flat_proxy_outs)
        elif is_te_backward(bsym) or (BoundSymbolTag.BACKWARD in bsym.tags and _is_any(bsym, _ZEROS)):
            zeros.update(o.name for o in bsym.flat_proxy_outs)
        summand = _only_summand(bsym, zeros)
        if summand is not None:
            swaps[variableify(bsym.output)] = summand
        else:
            bound_symbols.append(bsym)
    return with_bound_symbols(trace, bound_symbols, "Zero gradients")


def _without_zero_gradients(bsym: BoundSymbol, flows: set[str]) -> BoundSymbol:
    returned = bsym.args[0]
    grads = tuple(g if isinstance(g, Proxy) and g.name in flows else None for g in returned["output"])
    return bsym.from_bsym(args=({**returned, "output": grads},))


def _only_summand(bsym: BoundSymbol, zeros: set[str]) -> TensorProxy | None:
    """Of a sum of two gradients one of which is zero, the other, where it has the sum's type and shape."""
    if BoundSymbolTag.BACKWARD not in bsym.tags or not _is_any(bsym, _ADDS):
        return None
    tensors = [p for p in bsym.args if isinstance(p, TensorProxy)]
    others = [p for p in tensors if p.name not in zeros]
    if len(tensors) != 2 or len(others) != 1 or bsym.kwargs.get("alpha") not in (None, 1):
        return None
    (other,), out = others, bsym.output
    return other if (tuple(other.shape), other.dtype) == (tuple(out.shape), out.dtype) else None


def _is_any(bsym: BoundSymbol, symbols: tuple) -> bool:
    return any(bsym.sym == sym for sym in symbols)
