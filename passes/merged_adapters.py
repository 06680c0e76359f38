"""One product for all low-rank adapters that read one tensor, in forward and for their weights' gradients.

Before, ``x`` (M, K) being read by the first matrices of several adapters, ``A1`` and ``A2`` (16, K)::

    a1 = linear(x, A1)                       # (M, 16)
    ...
    a2 = linear(x, A2)
    ...
    gA2 = matmul(transpose(ga2), x)          # (16, K)
    ...
    gA1 = matmul(transpose(ga1), x)
    g = matmul(cat([ga2, ga1], 1), cat([A2, A1], 0))

After::

    [a1, a2] = split(linear(x, cat([A1, A2], 0)), [16, 16], -1)
    ...
    ga = cat([ga2, ga1], 1)
    [gA2, gA1] = split(matmul(transpose(ga), x), [16, 16], 0)
    g = matmul(ga, cat([A2, A1], 0))

Such a product does little but read ``x``, which is read once now. What is split is views: no kernel, and no more memory
is saved. Where all that reads ``a1`` and ``a2`` multiplies each by the same number, the product is multiplied before it
is split. Every number is the same sum of K or M products in float32, which a kernel for another shape may add up in
another order: an error of at most K or M times 2**-24 of the sum of their magnitudes, and then the same rounding.

Where the concatenated weights are read in backward they are made again: they are small, and the weights are there.

Merged is what gives at most ``WIDEST`` features from 8 times as many; in forward, where concatenating the weights moves
no more than reading ``x`` again did. The gradients' concatenation is there already where ``x`` has a gradient. An
adapter whose result is returned, or is read by other than products and pointwise operations, keeps a tensor of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from thunder_te_exec.passes.patterns import (
    Scaling,
    Uses,
    computes,
    concatenated,
    is_matmul,
    is_plain_linear,
    is_reshape,
    recorded,
    scaled,
    scaling_of,
    symbol_like,
    transposed_from,
)
from thunder_te_exec.passes.rewrite import with_bound_symbols, without_dead_symbols

from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

__all__ = ["WIDEST", "merged_adapters"]

#: Output features of what is merged, at most: they are few beside the input's, which are read.
WIDEST = 128

#: The name of what a tensor is a change of shape of, and its shape: tensors with the same are equal.
_Value = tuple[str, tuple[int, ...]]


@dataclass
class _Group:
    """Products that one product replaces.

    Attributes:
        members: the products, in order.
        at: the symbol in whose place the merged product stands: the first forward linear, or the last gradient or the
            concatenation.
        until: for gradients, the place of the first symbol that reads one of them.
        parts: for gradients, what each is made from beside the shared tensor.
        cat: a concatenation of all ``parts`` that the trace has anyway; None where it has none.
        scalings: for linears, what multiplies each result, where it is one number and nothing else reads them.
    """

    members: list[BoundSymbol]
    at: BoundSymbol
    until: int = 0
    parts: list[_Value] = field(default_factory=list)
    cat: BoundSymbol | None = None
    scalings: list[Scaling] = field(default_factory=list)

    def replaced(self) -> list[BoundSymbol]:
        return [*self.members, *(step for scaling in self.scalings for step in scaling.steps)]


def merged_adapters(trace: TraceCtx) -> TraceCtx:
    """Merge thin products of one tensor."""
    uses = Uses(trace)
    linears, gradients = _linears(trace, uses), _gradients(trace, uses)
    if not (linears or gradients):
        return trace
    merged = {id(bsym) for group in (*linears, *gradients) for bsym in group.replaced()}
    forward, backward = {id(group.at): group for group in linears}, defaultdict(list)
    for group in gradients:  # two may stand at one concatenation
        backward[id(group.at)].append(group)
    new = with_bound_symbols(trace, (), "Merged adapters")
    swaps: dict[Variable, Proxy] = {}
    for bsym in trace.bound_symbols:
        if id(bsym) not in merged:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(swaps))
        if id(bsym) in forward:
            _merge_linears(new, forward[id(bsym)], swaps)
        for group in backward.get(id(bsym), ()):
            _merge_gradients(new, group, uses, swaps)
    return without_dead_symbols(new, "Merged adapters")


def _is_thin(narrow: int, wide: int) -> bool:
    return 0 < narrow <= WIDEST and 8 * narrow <= wide


# --- forward ----------------------------------------------------------------------------------------------------------


def _linears(trace: TraceCtx, uses: Uses) -> list[_Group]:
    """Thin linears that read one tensor, and whose weights are there before the first of them."""
    groups: dict[tuple[str, frozenset], _Group] = {}
    for bsym in trace.bound_symbols:
        if not (is_plain_linear(bsym) and _is_thin(*bsym.args[1].shape) and _is_read_as_values(bsym.output, uses)):
            continue
        a, w = bsym.args[:2]
        # What runs in forward, in backward, or in both is merged with its like.
        group = groups.setdefault((a.name, frozenset(bsym.tags)), _Group([], bsym))
        made = uses.producer.get(w.name)
        if w.dtype == group.at.args[1].dtype and (made is None or uses.place[id(made)] < uses.place[id(group.at)]):
            group.members.append(bsym)
    found = [group for group in groups.values() if _is_worth_it(group.members)]
    for group in found:
        group.scalings = _common_scaling(group.members, uses)
    return found


def _common_scaling(linears: list[BoundSymbol], uses: Uses) -> list[Scaling]:
    """What multiplies each result, where all are by one number and nothing else reads them; else nothing."""
    scalings = [scaling_of(linear.output, uses) for linear in linears]
    if not all(s is not None and _is_read_as_values(s.result, uses) for s in scalings):
        return []
    return scalings if len({s.key for s in scalings}) == 1 else []


def _is_worth_it(linears: list[BoundSymbol]) -> bool:
    """Whether the weights are read and written once more for no more than the reads of the input that this spares."""
    a = linears[0].args[0]
    rows, features = a.numel // a.shape[-1], sum(linear.args[1].shape[0] for linear in linears)
    return len(linears) > 1 and 2 * features <= (len(linears) - 1) * rows


def _is_read_as_values(result: TensorProxy, uses: Uses) -> bool:
    """Whether neither ``result`` nor a view of it is returned, written to, or needed in memory of its own."""
    return all(map(computes, uses.readers_through_views(result)))


def _merge_linears(new: TraceCtx, group: _Group, swaps: dict[Variable, Proxy]) -> None:
    linears = [linear.from_bsym_swap_proxies(swaps) for linear in group.members]
    first = linears[0]
    weights = [linear.args[1] for linear in linears]
    new.bound_symbols += recorded(new, first, symbol_like(first, "cat"), weights, 0)
    weight = new.bound_symbols[-1].output
    new.bound_symbols += recorded(new, first, first.sym, first.args[0], weight, *first.args[2:], **first.kwargs)
    product, outputs = new.bound_symbols[-1].output, [linear.output for linear in linears]
    if group.scalings:
        product = scaled(new, product, group.scalings[0], first)
        outputs = [scaling.result for scaling in group.scalings]
    for output, result in zip(outputs, _split(new, first, product, [w.shape[0] for w in weights], -1)):
        swaps[variableify(output)] = result


# --- backward ---------------------------------------------------------------------------------------------------------


def _gradients(trace: TraceCtx, uses: Uses) -> list[_Group]:
    """Thin products ``transpose(g) @ x`` of one ``x``, none of which is read before all of them are there."""
    groups: list[_Group] = []
    newest: dict[tuple[_Value, frozenset], _Group] = {}
    cats: dict[_Value, list[BoundSymbol]] = {}
    for bsym in trace.bound_symbols:
        for part in concatenated(bsym, 1):
            cats.setdefault(_value(part, uses), []).append(bsym)
        g = _transposed_factor(bsym, uses)
        if g is None or not _is_thin(*bsym.output.shape) or BoundSymbolTag.BACKWARD not in bsym.tags:
            continue
        key = (_value(bsym.args[1], uses), frozenset(bsym.tags))
        group = newest.get(key)
        if group is None or group.until <= uses.place[id(bsym)]:
            group = newest[key] = _Group([], bsym, until=len(trace.bound_symbols))
            groups.append(group)
        group.members.append(bsym)
        group.parts.append(_value(g, uses))
        group.at = bsym
        places = (uses.place[id(reader)] for reader in uses.readers.get(bsym.output.name, ()))
        group.until = min(group.until, *places, len(trace.bound_symbols))
    groups = [group for group in groups if len(group.members) > 1]
    for group in groups:
        _take_concatenation(group, cats.get(group.parts[0], ()), uses)
    return groups


def _transposed_factor(bsym: BoundSymbol, uses: Uses) -> TensorProxy | None:
    """``g`` where ``bsym`` is ``transpose(g) @ x``."""
    made = uses.producer.get(bsym.args[0].name) if is_matmul(bsym) else None
    return transposed_from(made) if made is not None else None


def _take_concatenation(group: _Group, cats: list[BoundSymbol], uses: Uses) -> None:
    """Use the one of ``cats`` that has all that ``group`` concatenates, and is there before it is read."""
    for cat in cats:
        parts = {_value(part, uses) for part in concatenated(cat, 1)}
        if parts.issuperset(group.parts) and uses.place[id(cat)] < group.until and cat.tags == group.at.tags:
            group.cat = cat
            group.at = max(group.at, cat, key=lambda bsym: uses.place[id(bsym)])
            return


def _value(t: TensorProxy, uses: Uses) -> _Value:
    shape = tuple(t.shape)
    while (made := uses.producer.get(t.name)) is not None and is_reshape(made):
        t = made.args[0]
    return t.name, shape


def _merge_gradients(new: TraceCtx, group: _Group, uses: Uses, swaps: dict[Variable, Proxy]) -> None:
    products = [product.from_bsym_swap_proxies(swaps) for product in group.members]
    first = products[0]
    transposes = [uses.producer[product.args[0].name].from_bsym_swap_proxies(swaps) for product in group.members]
    if group.cat is None:
        parts, factors = group.parts, [transpose.args[0] for transpose in transposes]
        new.bound_symbols += recorded(new, first, symbol_like(first, "cat"), factors, 1)
        together = new.bound_symbols[-1].output
    else:
        factors, together = concatenated(group.cat, 1), group.cat.output
        parts = [_value(factor, uses) for factor in factors]
    new.bound_symbols += recorded(new, first, transposes[0].sym, together, *transposes[0].args[1:])
    new.bound_symbols += recorded(new, first, first.sym, new.bound_symbols[-1].output, first.args[1])
    product = new.bound_symbols[-1].output
    results = dict(zip(parts, _split(new, first, product, [factor.shape[1] for factor in factors], 0)))
    for product, part in zip(group.members, group.parts):
        swaps[variableify(product.output)] = results[part]


def _split(new: TraceCtx, like: BoundSymbol, tensor: TensorProxy, sizes: list[int], dim: int) -> list[TensorProxy]:
    """Views of ``tensor``, of these sizes."""
    new.bound_symbols += recorded(new, like, symbol_like(like, "split"), tensor, sizes, dim)
    return list(new.bound_symbols[-1].output)
