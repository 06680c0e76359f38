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
left to a fuser moves, and only past linears of one tensor, at most ``MOST`` of them. Cost model: when the last of them
runs, what the others gave is there still, and what was computed from it is not yet; a linear joins if that is no more
memory. Where torch runs each operation by itself nothing is done.
"""

from __future__ import annotations

from thunder_te_exec.passes.patterns import Uses, is_left_to_a_fuser, nbytes
from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import is_te_linear, is_te_quantize, is_te_recompute

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

__all__ = ["MOST", "adjacent_linears"]

#: Linears that run one behind the other at most.
MOST = 8


def adjacent_linears(trace: TraceCtx) -> TraceCtx:
    """Move what stands between linears of one tensor before the first, if one of them needs it, or behind the last."""
    uses = Uses(trace)
    order: list[BoundSymbol] = []
    group: _Group | None = None
    for bsym in trace.bound_symbols:
        if group is not None and not group.takes(bsym):
            order += group.ordered()
            group = None
        if group is None and _reads_for_fp8(bsym):
            group = _Group(bsym, uses)
        elif group is None:
            order.append(bsym)
    order += group.ordered() if group is not None else []
    if all(new is old for new, old in zip(order, trace.bound_symbols)):
        return trace
    return with_bound_symbols(trace, order, "Adjacent linears")


class _Group:
    """Linears that read one tensor, with its quantization, and what stands between and behind them."""

    def __init__(self, first: BoundSymbol, uses: Uses) -> None:
        self._first, self._uses = first, uses
        self._members = [first]
        self._between: list[BoundSymbol] = []
        self._since: list[BoundSymbol] = []  # the last member: it moves if another follows
        # By linears, and from what they make; a quantization is made before them.
        self._made = {out.name for out in first.flat_proxy_outs if not is_te_quantize(first)}

    def takes(self, bsym: BoundSymbol) -> bool:
        """Whether ``bsym`` is another member, or can stand on either side of one; if so it is kept."""
        reads = any(p.name in self._made for p in bsym.flat_proxy_args)
        if _reads_for_fp8(bsym):
            if reads or not self._is_alike(bsym) or self._holds_more_at(bsym):
                return False
            self._members.append(bsym)
            self._between += self._since
            self._since = []
        elif is_left_to_a_fuser(bsym):
            self._since.append(bsym)
        else:
            return False
        if reads or is_te_linear(bsym) or is_te_recompute(bsym):
            self._made.update(out.name for out in bsym.flat_proxy_outs)
        return True

    def _is_alike(self, bsym: BoundSymbol) -> bool:
        """Whether ``bsym`` reads the same tensor, in the same of forward and backward."""
        same = (BoundSymbolTag.BACKWARD in bsym.tags) == (BoundSymbolTag.BACKWARD in self._first.tags)
        linears = sum(not is_te_quantize(member) for member in self._members)
        return same and bsym.args[0].name == self._first.args[0].name and linears < MOST

    def _holds_more_at(self, bsym: BoundSymbol) -> bool:
        """Whether more is there when ``bsym`` runs if what is computed from the members comes behind it."""
        here = self._uses.place[id(bsym)]

        def bytes_of(made: list[BoundSymbol], read_later: bool) -> int:
            return sum(
                nbytes(out)
                for b in made
                for out in b.flat_proxy_outs
                if out.name in self._made and self._is_read(out, here) is read_later
            )

        computed = [*self._between, *self._since]
        return bytes_of(self._members, read_later=False) > bytes_of(computed, read_later=True)

    def _is_read(self, out: Proxy, after: int) -> bool:
        readers = self._uses.readers.get(out.name, ())
        return bool(readers) and self._uses.place[id(readers[-1])] > after

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
