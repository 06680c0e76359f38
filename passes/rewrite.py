"""What passes share: walking a trace by liveness, and making a new trace out of its rewritten symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_te_exec import compat  # noqa: F401  (before thunder)

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

__all__ = [
    "free_name",
    "insert_before_return",
    "joint_return",
    "liveness_order",
    "return_of",
    "with_bound_symbols",
    "without_dead_symbols",
]


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


def without_dead_symbols(trace: TraceCtx, provenance: str) -> TraceCtx:
    """``trace`` without the symbols that nobody needs since a pass has rewritten their readers."""
    return with_bound_symbols(trace, liveness_order(trace, lambda bsym, needed: bsym), provenance)


def free_name(trace: TraceCtx, name: str) -> str:
    """``name``, with underscores behind it where ``trace`` has it already."""
    while trace.has_name(name):
        name += "_"
    return name


def return_of(trace: TraceCtx) -> BoundSymbol:
    """The return of ``trace``, which is last but where a fuser put a symbol without outputs behind it."""
    return next(b for b in reversed(trace.bound_symbols) if b.sym.id is prims.PrimIDs.RETURN)


def joint_return(trace: TraceCtx) -> dict[str, Any] | None:
    """What a joint trace returns: gradients under "output", the forward's results under "fw_flat_out"; else None."""
    returned = return_of(trace).args
    return returned[0] if returned and isinstance(returned[0], dict) and "fw_flat_out" in returned[0] else None


def insert_before_return(trace: TraceCtx, bsym: BoundSymbol) -> list[BoundSymbol]:
    """The symbols of ``trace`` with ``bsym`` as the last thing that happens."""
    end = return_of(trace)
    return [s for b in trace.bound_symbols for s in ((bsym, b) if b is end else (b,))]
