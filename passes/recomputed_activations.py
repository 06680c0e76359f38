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
broadcast from, which is saved instead; a fuser makes them part of a kernel that reads these, and what is added is one
write of ``h``. What comes of ``bw_h`` waits for such a kernel, where it is only gradients to return: if another linear
stood between ``gA`` and ``gg``, ``bw_h`` and ``gA`` would move behind it. Where torch runs each operation by itself
nothing is done. A fuser need not round in between as the forward's kernel did, so that ``bw_h`` may differ from ``h``
in its last bit.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from thunder_te_exec.passes.patterns import Uses, is_fusible_code, is_pointwise
from thunder_te_exec.passes.rewrite import free_name, with_bound_symbols

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, has_tags
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["LONGEST", "SMALL", "recomputed_activations", "recomputed_in_kernels"]

#: Operations that one tensor is recomputed by at most, and that may wait for it.
LONGEST = 16
#: What is kept longer for them is smaller than the tensor by at least this factor.
SMALL = 8


def recomputed_activations(trace: TraceCtx) -> TraceCtx:
    """Copy the pointwise operations that make a saved tensor from other saved ones into backward."""
    return _recomputed(trace, operands=True)


def recomputed_in_kernels(trace: TraceCtx) -> TraceCtx:
    """The same but for what a product reads, which is saved: nothing is written for the rest.

    thunder saves what one region of a fuser makes and another reads, however wide, where both read what it is made of.
    """
    return _recomputed(trace, operands=False)


def _recomputed(trace: TraceCtx, *, operands: bool) -> TraceCtx:
    producer: dict[str, BoundSymbol] = {}
    saved: dict[str, TensorProxy] = {}
    kept = {p.name for p in trace.args if isinstance(p, TensorProxy)}
    for bsym in trace.bound_symbols:
        if _reads_in_backward(bsym):
            read = [p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy) and p.name in producer]
            saved.update((p.name, p) for p in read)
            if not operands and not is_fusible_code(bsym):
                kept.update(p.name for p in read)
        else:
            producer.update((out.name, bsym) for out in bsym.flat_proxy_outs)
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
        if _nbytes(tensor) < _nbytes(smallest):
            smallest = tensor
    return smallest.name


def _nbytes(t: TensorProxy) -> int:
    return t.numel * t.dtype.bytes


def _rewritten(trace: TraceCtx, plans: dict[str, list[BoundSymbol]]) -> TraceCtx:
    new = with_bound_symbols(trace, (), "Recomputed activations")
    swaps: dict[Variable, Proxy] = {}
    places = _later_places(trace, plans)  # of tensors that are not computed yet: where what reads them goes
    waiting: dict[int, list[BoundSymbol]] = {}

    def add(bsym: BoundSymbol) -> None:
        if _reads_in_backward(bsym):
            for name in dict.fromkeys(p.name for p in bsym.flat_proxy_args):
                for step in plans.pop(name, ()):
                    if variableify(step.output) not in swaps:
                        new.bound_symbols.append(_copied(step, new, swaps))
            bsym = bsym.from_bsym_swap_proxies(swaps)
        new.bound_symbols.append(bsym)

    with tracectx(new):
        for here, bsym in enumerate(trace.bound_symbols):
            for waited in waiting.pop(here, ()):
                add(waited)
            reads = (p.name for p in bsym.flat_proxy_args) if _reads_in_backward(bsym) else ()
            place = max((places.get(name, here) for name in reads), default=here)
            if place > here:
                waiting.setdefault(place, []).append(bsym)
                places.update((out.name, place) for out in bsym.flat_proxy_outs)
            else:
                add(bsym)
    return new


def _later_places(trace: TraceCtx, plans: dict[str, list[BoundSymbol]]) -> dict[str, int]:
    """For tensors to recompute, where another kernel reads what they are computed from: the place of its first symbol.

    Only where that is behind something that is no fuser's, and where nothing large lives longer for it.
    """
    uses = Uses(trace)
    walls = [i for i, b in enumerate(trace.bound_symbols) if b.sym.executor is not None]
    read_at: dict[str, list[int]] = {}  # by a fuser's code, in backward
    for i, bsym in enumerate(trace.bound_symbols):
        for p in bsym.flat_proxy_args if _reads_in_backward(bsym) and _is_a_fusers(bsym) else ():
            read_at.setdefault(p.name, []).append(i)
    places = {}
    for name, plan in plans.items():
        readers = [b for b in uses.readers[name] if _reads_in_backward(b)]
        wall = bisect.bisect(walls, uses.place[id(readers[0])])
        if wall == len(walls) or not _can_wait(readers, plan, uses):
            continue
        place, last = len(trace.bound_symbols), {}
        for read, sources in _computed_from(plan).items():
            at = read_at.get(read, []) if read != name else []
            first = bisect.bisect(at, walls[wall])
            place = min([place, *at[first : first + 1]])
            last.update((source, max([last.get(source, 0), *at[-1:]])) for source in sources)
        if all(at >= place for at in last.values()):
            places[name] = place
    return places


def _computed_from(plan: list[BoundSymbol]) -> dict[str, set[str]]:
    """For each tensor of ``plan`` the large ones, kept anyway, that it is or is computed from."""
    size = _nbytes(plan[-1].output)
    sources: dict[str, set[str]] = {}
    for step in plan:
        for p in step.flat_proxy_args:
            large = isinstance(p, TensorProxy) and 2 * _nbytes(p) >= size
            sources.setdefault(p.name, {p.name} if large else set())
        sources[step.output.name] = set().union(*(sources[p.name] for p in step.flat_proxy_args))
    return sources


def _can_wait(readers: Iterable[BoundSymbol], plan: list[BoundSymbol], uses: Uses) -> bool:
    """Whether all that comes of a tensor are returned gradients, by symbols that read nothing else of its size."""
    limit = _nbytes(plan[-1].output) // SMALL
    queue, seen = list(readers), set()
    large = {plan[-1].output.name}
    while queue:
        bsym = queue.pop()
        if bsym.sym.id is prims.PrimIDs.RETURN or id(bsym) in seen:
            continue
        seen.add(id(bsym))
        others = (p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy) and p.name not in large)
        if len(seen) > LONGEST or not _is_a_fusers(bsym) or any(_nbytes(p) > limit for p in others):
            return False
        for out in bsym.flat_proxy_outs:
            large.add(out.name)
            queue += uses.readers.get(out.name, ())
    return True


def _is_a_fusers(bsym: BoundSymbol) -> bool:
    return bsym.sym.executor is None and not has_tags(bsym, {prims.OpTags.RANDOM_OP, prims.OpTags.DONT_DCE})


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
