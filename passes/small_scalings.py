"""Multiply the small operand of a product by a number, not its large result, and a small result, not a large operand.

A LoRA adapter's output is scaled: ``y = base(x) + B(A(x)) * 2``. Before, in forward and in backward::

    z = linear(a, B)                  # a (M, 16), z (M, 4096)
    y = mul(z, 2.0)
    ...
    g2 = mul(2.0, g)                  # (M, 4096)
    ga = matmul(g2, B)                # (M, 16)
    gB = matmul(transpose(g2), a)     # (4096, 16)

After::

    a2 = mul(a, 2.0)
    y = linear(a2, B)
    ...
    t = matmul(g, B)
    ga = mul(2.0, t)
    gB = matmul(transpose(g), a2)

``gB`` reads what forward has multiplied where backward reads ``a`` for nothing else, so that no more is saved.

The same number but for the roundings of the scaled tensors, of which there are none where the number is a power of two.
In bfloat16 a multiplication stands between two casts, which move along. Float16 is left alone: what overflows it
depends on when it is scaled.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder_te_exec.passes.patterns import (
    Scaling,
    Uses,
    is_matmul,
    is_plain_linear,
    is_view,
    recorded,
    scaled,
    scaling_at,
)
from thunder_te_exec.passes.rewrite import with_bound_symbols, without_dead_symbols

from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

__all__ = ["small_scalings"]


class _Small(NamedTuple):
    """What has been scaled for a linear with these tags."""

    scaled: TensorProxy
    tags: set[BoundSymbolTag]


def small_scalings(trace: TraceCtx) -> TraceCtx:
    """Move multiplications by numbers to the smaller side of the products next to them."""
    uses = Uses(trace)
    scalings = [s for b in trace.bound_symbols if (s := scaling_at(b, uses)) is not None]
    of_results: dict[int, tuple[Scaling, BoundSymbol]] = {}
    products: dict[int, Scaling] = {}
    unscaled: dict[str, TensorProxy] = {}
    for scaling in scalings:
        linear = uses.producer.get(scaling.source.name)
        if linear is not None and is_plain_linear(linear) and uses.only_reader(scaling.source) is scaling.steps[0]:
            if linear.args[0].numel < scaling.source.numel:
                of_results[id(scaling.steps[-1])] = (scaling, linear)
                continue
        found = _products_of(scaling.result, uses)
        if found and all(p.output.numel < scaling.source.numel and id(p) not in products for p in found):
            products.update({id(p): scaling for p in found})
            unscaled[scaling.result.name] = scaling.source
    if not (of_results or unscaled):
        return trace
    return _rewritten(trace, of_results, products, unscaled, uses)


def _rewritten(
    trace: TraceCtx,
    of_results: dict[int, tuple[Scaling, BoundSymbol]],
    products: dict[int, Scaling],
    unscaled: dict[str, TensorProxy],
    uses: Uses,
) -> TraceCtx:
    new = with_bound_symbols(trace, (), "Scalings of small tensors")
    swaps: dict[Variable, Proxy] = {}
    small: dict[tuple[str, str], _Small] = {}
    for bsym in trace.bound_symbols:
        key, old = id(bsym), bsym
        bsym = bsym.from_bsym_swap_proxies(swaps)
        if key in of_results:
            scaling, linear = of_results[key]
            name, linear = linear.args[0].name, linear.from_bsym_swap_proxies(swaps)
            known = small.get((name, scaling.key))
            if known is None or known.tags != bsym.tags:
                known = small[name, scaling.key] = _Small(scaled(new, linear.args[0], scaling, bsym), bsym.tags)
            new.bound_symbols += recorded(new, bsym, linear.sym, known.scaled, *linear.args[1:], **linear.kwargs)
            swaps[variableify(old.output)] = new.bound_symbols[-1].output
            continue
        if key in products and _reads_scaled(new, bsym, products[key], small, uses):
            continue
        new.bound_symbols.append(bsym)
        if key in products:
            swaps[variableify(old.output)] = scaled(new, bsym.output, products[key], bsym)
        elif isinstance(old.output, TensorProxy) and old.output.name in unscaled:
            source = unscaled[old.output.name]
            swaps[variableify(old.output)] = swaps.get(variableify(source), source)
    return without_dead_symbols(new, "Scalings of small tensors")


def _reads_scaled(
    new: TraceCtx,
    product: BoundSymbol,
    scaling: Scaling,
    small: dict[tuple[str, str], _Small],
    uses: Uses,
) -> bool:
    """Add ``product`` to ``new`` with what is scaled already, if that is what one of its factors is.

    Not where backward reads the factor otherwise too: both would be saved.
    """
    for factor in product.args[:2]:
        unscaled, views = factor, []
        while (made := uses.producer.get(factor.name)) is not None and is_view(made):
            views.append(made)
            factor = made.args[0]
        known = small.get((factor.name, scaling.key))
        if known is None or _times_read_in_backward(factor, uses) > 1:
            continue
        factor = known.scaled
        for view in reversed(views):
            new.bound_symbols += recorded(new, product, view.sym, factor, *view.args[1:], **view.kwargs)
            factor = new.bound_symbols[-1].output
        new.bound_symbols.append(product.from_bsym_swap_proxies({variableify(unscaled): factor}))
        return True
    return False


def _times_read_in_backward(tensor: TensorProxy, uses: Uses) -> int:
    return sum(BoundSymbolTag.BACKWARD in reader.tags for reader in uses.readers_through_views(tensor))


def _products_of(scaled: TensorProxy, uses: Uses) -> list[BoundSymbol]:
    """The products that are all that ``scaled`` is used for, once in each; empty where it is used otherwise."""
    readers = uses.readers_through_views(scaled)
    once = len({id(reader) for reader in readers}) == len(readers)
    return readers if once and all(map(is_matmul, readers)) else []
