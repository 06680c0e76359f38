"""Reading traces: what thunder made before and after our passes, and as text that does not change from run to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import thunder_te_exec  # noqa: F401  (before thunder)
from thunder_te_exec import te_ex
from thunder_te_exec.passes.patterns import is_matmul
from thunder_te_exec.symbols import Wanted, is_te_backward, is_te_linear

import thunder
import torch
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor


class TraceRecorder(FusionExecutor):
    """Keeps the traces that it is given to fuse, and fuses nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.traces: list[TraceCtx] = []

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return False

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        self.traces.append(trace)
        return trace


def joint_trace(
    fn: Callable[..., Any], *args: Any, behind: Sequence[Any] = (), **options: Any
) -> tuple[TraceCtx, TraceCtx]:
    """The joint trace of ``fn(*args)`` before and after the executor's passes; ``behind`` it are other executors."""
    before, after = TraceRecorder("before"), TraceRecorder("after")
    thunder.jit(fn, executors=[before, te_ex, after, *behind], **options)(*args)
    return before.traces[-1], after.traces[-1]


def jitted(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``fn`` compiled by ``te_ex`` and called once on ``args``."""
    compiled = thunder.jit(fn, executors=[te_ex], **options)
    compiled(*args)
    return compiled


def forward_linears(compiled: Any) -> list[BoundSymbol]:
    return [b for b in thunder.last_traces(compiled)[-1].bound_symbols if is_te_linear(b)]


def backward_linears(compiled: Any) -> list[BoundSymbol]:
    traces = thunder.last_backward_traces(compiled)
    return [b for b in traces[-1].bound_symbols if is_te_backward(b)] if traces else []


def flags(bsyms: Sequence[BoundSymbol]) -> list[tuple[bool, bool, bool]]:
    """(input, weight, bias) flags of linears."""
    return [tuple(Wanted.of(b)) for b in bsyms]


def as_text(*traces: TraceCtx) -> str:
    """The traces' programs: tensors renumbered in order of appearance, with their types; no paths, no timings."""
    numbers: dict[str, int] = {}
    return "\n".join(_program(trace, numbers) for trace in traces)


_NAME = re.compile(r"\b((?:bw_)?(?:t|s|scale|qx|qg|ctx_te))(\d+)\b")


def _program(trace: TraceCtx, numbers: dict[str, int]) -> str:
    types = {
        p.name: p.type_string()
        for b in trace.bound_symbols
        if isinstance(b.output, tuple)
        for p in b.flat_proxy_outs
        if isinstance(p, TensorProxy)
    }
    lines = []
    for line in trace.python(print_depth=1).splitlines():
        if re.match(r"\s*# (/|<|Constructed)", line) or not line.strip():
            continue
        line = re.sub(r"\((.*)\) = update_aliases\(\((.*)\)\)", _in_order_of_inputs, line)
        lines.append(line)
        outputs = line.split(" = ")[0]
        if outputs.lstrip().startswith("("):
            lines += [f'    # {name}: "{types[name]}"' for name in re.findall(r"\w+", outputs) if name in types]

    def renumbered(match: re.Match[str]) -> str:
        prefix = match.group(1)
        before = sum(n.startswith(prefix) and n[len(prefix) :].isdigit() for n in numbers)
        number = numbers.setdefault(match.group(0), before)
        return f"{prefix}{number}"

    return _NAME.sub(renumbered, "\n".join(lines)) + "\n"


def _in_order_of_inputs(match: re.Match[str]) -> str:
    """The pairs of an ``update_aliases``, which thunder puts in the order of a set."""
    outputs, inputs = (re.findall(r"\w+", group) for group in match.groups())
    pairs = sorted(zip(inputs, outputs), key=lambda pair: (len(pair[0]), pair[0]))
    return f"({', '.join(o for _, o in pairs)},) = update_aliases(({', '.join(i for i, _ in pairs)},))"


def products_in_backward(trace: TraceCtx, *shape: int) -> list[int]:
    """The places of the products in high precision that backward computes, and that have this shape."""
    return [
        i
        for i, b in enumerate(trace.bound_symbols)
        if BoundSymbolTag.BACKWARD in b.tags and is_matmul(b) and tuple(b.output.shape) == shape
    ]


def makes_everything_before_it_is_read(trace: TraceCtx) -> bool:
    made = {p.name for p in trace.args if isinstance(p, Proxy)}
    for bsym in trace.bound_symbols:
        if not all(p.name in made for p in bsym.flat_proxy_args):
            return False
        made |= {out.name for out in bsym.flat_proxy_outs}
    return True


def tensors_saved(out: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that autograd keeps for the backward of ``out``."""
    return list(out.grad_fn.saved_tensors)
