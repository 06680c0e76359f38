"""Compute again in backward what is cheap to compute from what is saved anyway, instead of saving it too.

Before, ``g`` and ``u`` being read in backward for other reasons::

    h = mul(silu(g), u)
    (y, ...) = te_linear(h, w, None, ...)
    ...
    gA = matmul(transpose(ga), h)
    gg = mul(mul(gy, u), ...)

After::

    h = mul(silu(g), u)
    (y, ...) = te_linear(h, w, None, ...)
    ...
    bw_h = mul(silu(g), u)
    gA = matmul(transpose(ga), bw_h)
    gg = mul(mul(gy, u), ...)

thunder saves what backward reads, so ``h`` is no longer saved. Cost model: pointwise operations and broadcasts, at most
``LONGEST`` of them, on tensors that backward reads in any case, or on the smaller one that a tensor was cast or
broadcast from, which is saved instead; a fuser makes them part of a kernel that reads these,
and what is added is one write of ``h``. Where torch runs each operation by itself nothing is done. A fuser need not
round in between as the forward's kernel did, so that ``bw_h`` may differ from ``h`` in its last bit.
"""

from __future__ import annotations

from thunder_te_exec.passes.patterns import is_pointwise, nbytes
from thunder_te_exec.passes.rewrite import free_name, with_bound_symbols

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["LONGEST", "recomputed_activations"]

#: Operations that one tensor is recomputed by at most.
LONGEST = 16


def recomputed_activations(trace: TraceCtx) -> TraceCtx:
    """Copy the pointwise operations that make a saved tensor from other saved ones into backward."""
    producer: dict[str, BoundSymbol] = {}
    saved: dict[str, TensorProxy] = {}
    for bsym in trace.bound_symbols:
        if _reads_in_backward(bsym):
            saved.update((p.name, p) for p in bsym.flat_proxy_args if isinstance(p, TensorProxy) and p.name in producer)
        else:
            producer.update((out.name, bsym) for out in bsym.flat_proxy_outs)
    kept = {p.name for p in trace.args if isinstance(p, TensorProxy)}
    kept |= {name for name in saved if not is_pointwise(producer[name])}
    plans: dict[str, list[BoundSymbol]] = {}
    for name in (name for name in producer if name in saved and name not in kept):  # as the forward computes them
        plan = _plan(name, producer, kept)
        if plan is None:
            kept.add(_smallest_source(saved[name], producer))
            plan = _plan(name, producer, kept)
        if plan:
            plans[name] = plan
    return _rewritten(trace, plans) if plans else trace


def _reads_in_backward(bsym: BoundSymbol) -> bool:
    """Whether what ``bsym`` reads is saved; ``get_grad`` names the output whose gradient it gives."""
    return BoundSymbolTag.BACKWARD in bsym.tags and bsym.sym.id is not prims.PrimIDs.GET_GRAD


def _plan(name: str, producer: dict[str, BoundSymbol], kept: set[str]) -> list[BoundSymbol] | None:
    """The operations that compute ``name`` from what is kept, in order; None where there are none, or too many."""
    order: list[BoundSymbol] = []
    seen: set[int] = set()

    def visit(name: str) -> bool:
        if name in kept:
            return True
        bsym = producer.get(name)
        if bsym is None or not is_pointwise(bsym) or len(seen) >= LONGEST:
            return False
        if id(bsym) not in seen:
            seen.add(id(bsym))
            if not all(visit(p.name) for p in bsym.flat_proxy_args):
                return False
            order.append(bsym)
        return True

    return order if visit(name) else None


def _smallest_source(tensor: TensorProxy, producer: dict[str, BoundSymbol]) -> str:
    """The smallest tensor that ``tensor`` was cast or broadcast from, as it is before it is widened."""
    smallest = tensor
    while (bsym := producer.get(tensor.name)) is not None and is_pointwise(bsym):
        sources = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
        if len(sources) != 1:
            break
        tensor = sources[0]
        if nbytes(tensor) < nbytes(smallest):
            smallest = tensor
    return smallest.name


def _rewritten(trace: TraceCtx, plans: dict[str, list[BoundSymbol]]) -> TraceCtx:
    new = with_bound_symbols(trace, (), "Recomputed activations")
    swaps: dict[Variable, Proxy] = {}
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if _reads_in_backward(bsym):
                for name in dict.fromkeys(p.name for p in bsym.flat_proxy_args):
                    for step in plans.pop(name, ()):
                        if variableify(step.output) not in swaps:
                            new.bound_symbols.append(_copied(step, new, swaps))
                bsym = bsym.from_bsym_swap_proxies(swaps)
            new.bound_symbols.append(bsym)
    return new


def _copied(step: BoundSymbol, new: TraceCtx, swaps: dict[Variable, Proxy]) -> BoundSymbol:
    """``step`` once more, on copies of what it reads, with outputs of its own."""
    inner = {}
    for bsym in _with_subsymbols(step):
        for out in bsym.flat_proxy_outs:
            if variableify(out) not in swaps and variableify(out) not in inner:
                inner[variableify(out)] = out.replace(name=free_name(new, f"bw_{out.name}"))
    swaps[variableify(step.output)] = inner[variableify(step.output)]
    copy = step.from_bsym_swap_proxies({**inner, **swaps})
    copy.tags |= {BoundSymbolTag.BACKWARD}
    return copy


def _with_subsymbols(bsym: BoundSymbol) -> list[BoundSymbol]:
    return [bsym, *(inner for sub in bsym.subsymbols for inner in _with_subsymbols(sub))]
