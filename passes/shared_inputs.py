"""Quantize a tensor once for all linears that read it.

Before::

    (q, (s0, s1), ctx_te_0) = te_linear(x, wq, None, input_requires_grad=True, weight_requires_grad=False, ...)
    (k, (s2, s3, s4, s5), ctx_te_1) = te_linear(x, wk, None, ..., weight_requires_grad=True, ...)

After::

    qx = te_quantize_input(x, columnwise=True)
    (q, (s0, s1), ctx_te_0) = te_linear(x, wq, None, ..., quantized_input=qx)
    (k, (s2, s3, s4, s5), ctx_te_1) = te_linear(x, wk, None, ..., quantized_input=qx)

``columnwise``: whether one of them wants a weight gradient, which reads the column-wise copy. Under delayed scaling
they share the first one's scale and amax history for the tensor. A linear that is recomputed in backward quantizes by
itself.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.symbols import Wanted, is_te_linear, of_the_executor_of, te_quantize_input

from thunder.core.proxies import AnyProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

__all__ = ["shared_inputs"]


def shared_inputs(trace: TraceCtx) -> TraceCtx:
    """Put one ``te_quantize_input`` before the first of several ``te_linear`` that read one tensor."""
    readers: dict[str, list[BoundSymbol]] = {}
    for bsym in trace.bound_symbols:
        if is_te_linear(bsym) and "quantized_input" not in bsym.kwargs:
            readers.setdefault(bsym.args[0].name, []).append(bsym)
    groups = {name: group for name, group in readers.items() if len(group) > 1}
    if not groups:
        return trace
    new = with_bound_symbols(trace, (), "Shared quantized inputs")
    quantized: dict[str, AnyProxy] = {}
    with tracectx(new):
        for bsym in trace.bound_symbols:
            group = groups.get(bsym.args[0].name) if is_te_linear(bsym) else None
            if group is not None:
                if bsym is group[0]:
                    new.bound_symbols.append(_quantization(group))
                    quantized[bsym.args[0].name] = new.bound_symbols[-1].output
                bsym = bsym.from_bsym(kwargs={**bsym.kwargs, "quantized_input": quantized[bsym.args[0].name]})
            new.bound_symbols.append(bsym)
    return new


def _quantization(group: list[BoundSymbol]) -> BoundSymbol:
    columnwise = any(Wanted.of(bsym).weight for bsym in group)
    symbol = of_the_executor_of(group[0], te_quantize_input)
    quantization = symbol.bind(group[0].args[0], columnwise=columnwise, output=AnyProxy(object(), prefix="qx"))
    quantization.tags |= group[0].tags
    return quantization
