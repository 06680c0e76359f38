"""Update the gradients' FP8 scales once a backward, after its last quantization.

Before::

    (gx, _, _) = te_functional_linear_backward(...)
    return {'output': (gx, None), ...}

After::

    (gx, _, _) = te_functional_linear_backward(...)
    te_sync_fp8_meta_bwd()
    return {'output': (gx, None), ...}

The symbol has no outputs and is tagged ``DONT_DCE``, so thunder puts it into the backward trace. It is left out where
no gradient is quantized. The forward's counterpart is no symbol: it happens when the forward's FP8 context, which the
forward trace shows as its decorator, exits.
"""

from __future__ import annotations

from thunder_te_exec.passes.rewrite import insert_before_return, with_bound_symbols
from thunder_te_exec.symbols import Wanted, is_te_backward, te_sync_fp8_meta_bwd

from thunder.core.symbol import BoundSymbolTag
from thunder.core.trace import TraceCtx

__all__ = ["fp8_meta_sync"]


def fp8_meta_sync(trace: TraceCtx) -> TraceCtx:
    """Add ``te_sync_fp8_meta_bwd`` last before the return, where a claimed linear quantizes a gradient."""
    if not any(is_te_backward(b) and Wanted.of(b).quantizes_grad_output for b in trace.bound_symbols):
        return trace
    sync = te_sync_fp8_meta_bwd.bind(output=None)
    sync.tags.add(BoundSymbolTag.BACKWARD)
    return with_bound_symbols(trace, insert_before_return(trace, sync), "FP8 scale update of backward")
