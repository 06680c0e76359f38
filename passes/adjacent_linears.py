"""Run the linears that read one tensor one behind the other, so that a fuser finds more standing together.

Before::

    qx = te_quantize_input(x, columnwise=False)
    (q, ...) = te_linear(x, wq, None, ..., accumulate=aq, quantized_input=qx)
    r = mul(q, cos)
    ak = linear(tk, bk)
    (k, ...) = te_linear(x, wk, None, ..., accumulate=ak, quantized_input=qx)
    s = mul(k, cos)

After::

    ak = linear(tk, bk)
    qx = te_quantize_input(x, columnwise=False)
    (q, ...) = te_linear(x, wq, None, ..., accumulate=aq, quantized_input=qx)
    (k, ...) = te_linear(x, wk, None, ..., accumulate=ak, quantized_input=qx)
    r = mul(q, cos)
    s = mul(k, cos)

thunder's fusers compile what stands together into one function, each of which costs a call on the host. Only what is
left to a fuser moves, and past nothing but the linears of one tensor: where torch runs each operation by itself, or
where something else stands between two linears, nothing is done, so that no tensor lives much longer than before.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import is_te_linear, is_te_quantize, is_te_recompute

from thunder.core import prims
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, has_tags
from thunder.core.trace import TraceCtx

__all__ = ["adjacent_linears"]

_STAYS = {prims.OpTags.RANDOM_OP, prims.OpTags.DONT_DCE}


def adjacent_linears(trace: TraceCtx) -> TraceCtx:
    """Move what stands between linears of one tensor before the first, if one of them needs it, or behind the last."""
    order: list[BoundSymbol] = []
    group: _Group | None = None
    for bsym in trace.bound_symbols:
        if group is not None and not group.takes(bsym):
            order += group.ordered()
            group = None
        if group is None and _reads_for_fp8(bsym):
            group = _Group(bsym)
        elif group is None:
            order.append(bsym)
    order += group.ordered() if group is not None else []
    if all(new is old for new, old in zip(order, trace.bound_symbols)):
        return trace
    return with_bound_symbols(trace, order, "Adjacent linears")


class _Group:
    """Linears that read one tensor, with its quantization, and what stands between and behind them."""

    def __init__(self, first: BoundSymbol) -> None:
        self._first = first
        self._members = [first]
        self._between: list[BoundSymbol] = []
        self._since: list[BoundSymbol] = []  # the last member: it moves if another follows
        # By linears, and from what they make; a quantization is made before them.
        self._made = {out.name for out in first.flat_proxy_outs if not is_te_quantize(first)}

    def takes(self, bsym: BoundSymbol) -> bool:
        """Whether ``bsym`` is another member, or can stand on either side of one; if so it is kept."""
        if (BoundSymbolTag.BACKWARD in bsym.tags) != (BoundSymbolTag.BACKWARD in self._first.tags):
            return False
        reads = any(p.name in self._made for p in bsym.flat_proxy_args)
        if _reads_for_fp8(bsym):
            if reads or bsym.args[0].name != self._first.args[0].name:
                return False
            self._members.append(bsym)
            self._between += self._since
            self._since = []
        elif bsym.sym.executor is not None or bsym.sym.id is prims.PrimIDs.RETURN or has_tags(bsym, _STAYS):
            return False
        else:
            self._since.append(bsym)
        if reads or is_te_linear(bsym) or is_te_recompute(bsym):
            self._made.update(out.name for out in bsym.flat_proxy_outs)
        return True

    def ordered(self) -> list[BoundSymbol]:
        """What members read stays before them; all else comes behind, nearer to what reads it."""
        needed = {p.name for member in self._members for p in member.flat_proxy_args}
        before, behind = [], []
        for bsym in reversed(self._between):
            if any(out.name in needed for out in bsym.flat_proxy_outs):
                needed.update(p.name for p in bsym.flat_proxy_args)
                before.append(bsym)
            else:
                behind.append(bsym)
        return [*reversed(before), *self._members, *reversed(behind), *self._since]


def _reads_for_fp8(bsym: BoundSymbol) -> bool:
    return is_te_linear(bsym) or is_te_recompute(bsym) or is_te_quantize(bsym)
