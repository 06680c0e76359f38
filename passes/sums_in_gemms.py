"""Let GEMMs add up: a sum of products becomes GEMMs that accumulate into one tensor.

In forward an adapter's output is added to its frozen linear's, in backward all input gradients of linears that read one
tensor. Before::

    (y, (s0, s1), ctx) = te_linear(x, w, None, input_requires_grad=True, ...)
    b = linear(a, B)
    o = add(y, b)
    ...
    g1 = reshape(matmul(ga, A), (4, 32, 64))
    (g2, _, _) = te_functional_linear_backward(..., input_requires_grad=True, ...)
    g = add(g1, g2)

After::

    b = linear(a, B)
    (o, (s0, s1), ctx) = te_linear(x, w, None, input_requires_grad=True, ..., accumulate=b)
    ...
    g1 = reshape(matmul(ga, A), (4, 32, 64))
    (g, _, _) = te_functional_linear_backward(..., input_requires_grad=True, ..., accumulate=g1)

``o`` is ``b``, written to in place: the sum costs no kernel and no memory, and is rounded once instead of twice. Only
what a product has freshly made is written to, and only where the sum was all that read it. Products in high precision
that are terms of one sum become one: ``ga1 @ A1 + ga2 @ A2`` is ``cat(ga1, ga2) @ cat(A1, A2)``. What is no product,
such as the gradient that comes along a residual connection, is added last. In bfloat16 the sum may stand between casts.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder_te_exec.passes.patterns import (
    Uses,
    cast_from,
    is_add,
    is_matmul,
    is_plain_linear,
    is_reshape,
    recorded,
    symbol_like,
    widened_from,
)
from thunder_te_exec.passes.rewrite import with_bound_symbols, without_dead_symbols
from thunder_te_exec.symbols import is_te_backward, is_te_linear, is_te_recompute

from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

__all__ = ["sums_in_gemms"]


class _Term(NamedTuple):
    """A term of a sum: what is added, and the product that it is the result, or a view of the result, of, if any."""

    product: BoundSymbol | None
    proxy: TensorProxy

    @property
    def in_fp8(self) -> bool:
        return self.product is not None and not (is_matmul(self.product) or is_plain_linear(self.product))


def sums_in_gemms(trace: TraceCtx) -> TraceCtx:
    """Replace sums of products, at least one of which runs in FP8, by products that accumulate."""
    uses = Uses(trace)
    sums = {
        id(uses.producer[root]): terms
        for root, terms in _sums(trace, uses).items()
        if _can_move_to(uses.producer[root], terms, uses)
    }
    if not sums:
        return trace
    moved = {id(term.product) for terms in sums.values() for term in terms if term.in_fp8}
    new = with_bound_symbols(trace, (), "Sums in GEMMs")
    swaps: dict[Variable, Proxy] = {}
    for bsym in trace.bound_symbols:
        if id(bsym) in sums:
            swaps[variableify(bsym.output)] = _accumulate(new, bsym, sums[id(bsym)], swaps)
        elif id(bsym) not in moved:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(swaps))
    return without_dead_symbols(new, "Sums in GEMMs")


def _sums(trace: TraceCtx, uses: Uses) -> dict[str, list[_Term]]:
    """By the name of its result, the terms of each sum of products that is no part of a larger one."""
    sums: dict[str, list[_Term]] = {}
    # Between casts: the terms, and the names of the sums that they are parts of where the result is cast back.
    wide: dict[str, tuple[list[_Term], list[str]]] = {}
    for bsym in trace.bound_symbols:
        out = _result(bsym)
        if out is None:
            continue
        if _is_product(bsym):
            sums[out.name] = [_Term(bsym, out)]
            continue
        # What nobody else reads.
        operands = [a for a in bsym.args[:2] if isinstance(a, TensorProxy) and uses.only_reader(a) is bsym]
        if is_reshape(bsym) and operands and len(terms := sums.get(operands[0].name, ())) == 1:
            if not terms[0].in_fp8:
                sums[out.name] = [_Term(terms[0].product, out)]
        elif is_add(bsym) and bsym.args[0] is not bsym.args[1]:
            if len(operands) == 2 and all(a.name in wide for a in operands):
                wide[out.name] = tuple(a + b for a, b in zip(*(wide[a.name] for a in operands)))
            elif any(a.name in sums for a in operands):
                own = {a.name for a in operands if a.name in sums}
                first, second = (sums.pop(a.name) if a.name in own else [_Term(None, a)] for a in bsym.args[:2])
                first += second  # in place: a chain of sums is as long as its trace
                sums[out.name] = first
        elif cast_from(bsym) is not None and operands:
            (source,) = operands
            of_products = source.name in sums and all(term.product is not None for term in sums[source.name])
            if of_products and widened_from(bsym) is not None:
                wide[out.name] = sums[source.name], [source.name]
            elif source.name in wide and all(t.proxy.dtype == out.dtype for t in wide[source.name][0]):
                terms, parts = wide[source.name]
                for part in parts:
                    del sums[part]
                sums[out.name] = terms
    return {name: terms for name, terms in sums.items() if _is_worth_it(terms)}


def _is_worth_it(terms: list[_Term]) -> bool:
    products = [term for term in terms if term.product is not None]
    return len(products) > 1 and any(term.in_fp8 for term in products)


def _is_product(bsym: BoundSymbol) -> bool:
    ours = is_te_linear(bsym) or is_te_recompute(bsym) or is_te_backward(bsym)
    return (ours and "accumulate" not in bsym.kwargs) or is_matmul(bsym) or is_plain_linear(bsym)


def _result(bsym: BoundSymbol) -> TensorProxy | None:
    """A linear's output, a backward's input gradient, or the one output of another symbol."""
    out = bsym.output[0] if isinstance(bsym.output, tuple) and bsym.output else bsym.output
    return out if isinstance(out, TensorProxy) else None


def _can_move_to(root: BoundSymbol, terms: list[_Term], uses: Uses) -> bool:
    """Whether what else the FP8 products of ``terms`` give is read after ``root`` only."""
    place = uses.place[id(root)]
    return all(
        uses.place[id(reader)] > place
        for term in terms
        if term.in_fp8
        for other in term.product.flat_proxy_outs
        if other is not term.proxy
        for reader in uses.readers.get(other.name, ())
    )


def _accumulate(new: TraceCtx, root: BoundSymbol, terms: list[_Term], swaps: dict[Variable, Proxy]) -> TensorProxy:
    """Add to ``new`` what computes the sum of ``terms``, in the place of ``root``; gives its result."""
    plain = [term for term in terms if term.product is not None and not term.in_fp8]
    into = _sum_of_plain_products(new, root, plain, swaps)
    for product in (term.product for term in terms if term.in_fp8):
        product = product.from_bsym_swap_proxies(swaps)
        if into is not None:
            product = product.from_bsym(kwargs={**product.kwargs, "accumulate": into})
        new.bound_symbols.append(product)
        into = product.output[0]
    for other in (term.proxy for term in terms if term.product is None):
        other = swaps.get(variableify(other), other)
        new.bound_symbols += recorded(new, root, symbol_like(root, "add"), other, into)
        into = new.bound_symbols[-1].output
    return into


def _sum_of_plain_products(
    new: TraceCtx, root: BoundSymbol, others: list[_Term], swaps: dict[Variable, Proxy]
) -> TensorProxy | None:
    """The sum of products in high precision, in one product where they can be one."""
    if len(others) < 2:
        return others[0].proxy if others else None
    if all(map(is_matmul, (t.product for t in others))) and len({tuple(t.product.output.shape) for t in others}) == 1:
        like = others[0].product
        operands = zip(*(term.product.from_bsym_swap_proxies(swaps).args[:2] for term in others))
        cat = symbol_like(like, "cat")
        merged = []
        for factors, dim in zip(operands, (1, 0)):
            new.bound_symbols += recorded(new, root, cat, list(factors), dim)
            merged.append(new.bound_symbols[-1].output)
        new.bound_symbols += recorded(new, root, like.sym, *merged)
        return _shaped(new, root, others[0], new.bound_symbols[-1].output)
    total = others[0].proxy
    for term in others[1:]:
        new.bound_symbols += recorded(new, root, symbol_like(others[0].product, "add"), total, term.proxy)
        total = new.bound_symbols[-1].output
    return total


def _shaped(new: TraceCtx, root: BoundSymbol, term: _Term, product: TensorProxy) -> TensorProxy:
    if tuple(product.shape) == tuple(term.proxy.shape):
        return product
    new.bound_symbols += recorded(new, root, symbol_like(term.product, "reshape"), product, tuple(term.proxy.shape))
    return new.bound_symbols[-1].output
