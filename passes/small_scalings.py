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
    u = matmul(transpose(g), a)
    gB = mul(2.0, u)

The same number but for the roundings of the scaled tensors, of which there are none where the number is a power of two.
In bfloat16 a multiplication stands between two casts, which move along. Float16 is left alone: what overflows it
depends on when it is scaled.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder_te_exec.passes.patterns import (
    Uses,
    cast_from,
    is_matmul,
    is_plain_linear,
    is_view,
    recorded,
    scaled_by,
    widened_from,
)
from thunder_te_exec.passes.rewrite import with_bound_symbols, without_dead_symbols

from thunder.core import dtypes
from thunder.core.proxies import Proxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

__all__ = ["small_scalings"]


class _Scaling(NamedTuple):
    """``result = number * source``, by ``steps``: a multiplication, between two casts where there are any."""

    source: TensorProxy
    steps: tuple[BoundSymbol, ...]

    @property
    def result(self) -> TensorProxy:
        return self.steps[-1].output


def small_scalings(trace: TraceCtx) -> TraceCtx:
    """Move multiplications by numbers to the smaller side of the products next to them."""
    uses = Uses(trace)
    scalings = [s for b in trace.bound_symbols if (s := _scaling_at(b, uses)) is not None]
    of_results: dict[int, tuple[_Scaling, BoundSymbol]] = {}
    products: dict[int, _Scaling] = {}
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
    return _rewritten(trace, of_results, products, unscaled)


def _rewritten(
    trace: TraceCtx,
    of_results: dict[int, tuple[_Scaling, BoundSymbol]],
    products: dict[int, _Scaling],
    unscaled: dict[str, TensorProxy],
) -> TraceCtx:
    new = with_bound_symbols(trace, (), "Scalings of small tensors")
    swaps: dict[Variable, Proxy] = {}

    def scaled(source: TensorProxy, scaling: _Scaling, like: BoundSymbol) -> TensorProxy:
        for step in scaling.steps:
            old = next(a for a in step.args if isinstance(a, TensorProxy))
            # A number of another type would be cast, by a symbol without tensors that fusers cannot take.
            args = [source if a is old else float(a) if type(a) is int else a for a in step.args]
            new.bound_symbols += recorded(new, like, step.sym, *args, **step.kwargs)
            source = new.bound_symbols[-1].output
        return source

    for bsym in trace.bound_symbols:
        key, old = id(bsym), bsym
        bsym = bsym.from_bsym_swap_proxies(swaps)
        if key in of_results:
            scaling, linear = of_results[key]
            linear = linear.from_bsym_swap_proxies(swaps)
            small = scaled(linear.args[0], scaling, bsym)
            new.bound_symbols += recorded(new, bsym, linear.sym, small, *linear.args[1:], **linear.kwargs)
            swaps[variableify(old.output)] = new.bound_symbols[-1].output
            continue
        new.bound_symbols.append(bsym)
        if key in products:
            swaps[variableify(old.output)] = scaled(bsym.output, products[key], bsym)
        elif isinstance(old.output, TensorProxy) and old.output.name in unscaled:
            source = unscaled[old.output.name]
            swaps[variableify(old.output)] = swaps.get(variableify(source), source)
    return without_dead_symbols(new, "Scalings of small tensors")


def _scaling_at(bsym: BoundSymbol, uses: Uses) -> _Scaling | None:
    """The scaling whose last step is ``bsym``, its inner results being read by it alone."""
    if getattr(bsym.output, "dtype", dtypes.float16) == dtypes.float16:
        return None
    if scaled_by(bsym) is not None:
        source, _ = scaled_by(bsym)
        reader = uses.only_reader(bsym.output)
        inner = reader is not None and cast_from(reader) is not None
        return None if inner else _Scaling(source, (bsym,))
    middle = cast_from(bsym)
    mul = uses.producer.get(middle.name) if middle is not None else None
    if mul is None or scaled_by(mul) is None or uses.only_reader(middle) is not bsym:
        return None
    wide, _ = scaled_by(mul)
    up = uses.producer.get(wide.name)
    source = widened_from(up) if up is not None else None
    if source is None or source.dtype != bsym.output.dtype:
        return None
    return _Scaling(source, (up, mul, bsym))


def _products_of(scaled: TensorProxy, uses: Uses) -> list[BoundSymbol]:
    """The products that are all that ``scaled`` is used for, once in each; empty where it is used otherwise."""
    found: dict[int, BoundSymbol] = {}
    views = [scaled]
    while views:
        view = views.pop()
        for reader in uses.readers.get(view.name, ()):
            if is_view(reader):
                views.append(reader.output)
            elif is_matmul(reader) and id(reader) not in found:
                found[id(reader)] = reader
            else:
                return []
    return list(found.values())
