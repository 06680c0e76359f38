"""What passes share: walking a trace by liveness, and making a new trace out of its rewritten symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder_te_exec import compat  # noqa: F401  (before thunder)

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

__all__ = ["insert_before_return", "liveness_order", "with_bound_symbols"]


def with_bound_symbols(trace: TraceCtx, bound_symbols: Sequence[BoundSymbol], provenance: str) -> TraceCtx:
    """A copy of ``trace`` with other symbols, that says in its header which pass made it."""
    new = from_trace(trace)
    new.names = set(new.names)  # thunder shares the set: names that a pass adds are the new trace's alone
    new.bound_symbols = list(bound_symbols)
    new.set_provenance(TraceProvenance(provenance))
    return new


def liveness_order(trace: TraceCtx, rewrite: Callable[[BoundSymbol, set[str]], BoundSymbol]) -> list[BoundSymbol]:
    """Rewrite the symbols of ``trace`` from last to first, dropping those that nobody needs.

    ``rewrite(bsym, needed)`` is called for each needed symbol once all its readers have been rewritten; ``needed`` has
    the names of the proxies that these, or the trace's return, read. What it returns decides what is needed before it.
    A symbol is needed when one of its outputs is, or when it is tagged ``DONT_DCE``.
    """
    needed = {p.name for p in tree_flatten(trace.output)[0] if isinstance(p, Proxy)}
    kept = []
    for bsym in reversed(trace.bound_symbols):
        if not (has_tags(bsym, {prims.OpTags.DONT_DCE}) or any(o.name in needed for o in bsym.flat_proxy_outs)):
            continue
        bsym = rewrite(bsym, needed)
        needed.update(p.name for p in bsym.flat_proxy_args)
        kept.append(bsym)
    kept.reverse()
    return kept


def insert_before_return(bound_symbols: Sequence[BoundSymbol], bsym: BoundSymbol) -> list[BoundSymbol]:
    """``bound_symbols`` with ``bsym`` as the last thing that happens."""
    at = next(i for i in range(len(bound_symbols) - 1, -1, -1) if bound_symbols[i].sym.id is prims.PrimIDs.RETURN)
    return [*bound_symbols[:at], bsym, *bound_symbols[at:]]
