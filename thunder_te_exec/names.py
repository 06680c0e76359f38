"""From a weight in a trace to the fully qualified name of the parameter it comes from."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from thunder_te_exec import compat  # noqa: F401  (before thunder)

import thunder.distributed.prims as dist_prims
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torchex import ex as torch_ex

__all__ = ["WeightNames", "check_parameter_names"]

_UNPACK_IDS = (prims.PrimIDs.UNPACK_PARAMETER, prims.PrimIDs.UNPACK_BUFFER)

_TRANSPARENT_TORCH_OPS = (
    "to",
    "permute",
    "transpose",
    "reshape",
    "torch_prims_reshape_impl",
    "torch_all_gather_prim_impl",
    "torch_wait_prim_impl",
)

#: Symbols whose output is still "the parameter": casts, transpositions and gathers, but no arithmetic.
_TRANSPARENT_IDS = frozenset(
    {
        prims.PrimIDs.CONVERT_ELEMENT_TYPE,
        prims.PrimIDs.TRANSPOSE,
        prims.PrimIDs.SHALLOW_COPY,
        prims.PrimIDs.RESHAPE,
        dist_prims.PrimIDs.SYNCHRONIZE,
        dist_prims.PrimIDs.ALL_GATHER,
        dist_prims.PrimIDs.WAIT,
        ltorch.to.id,
        ltorch.contiguous.id,
        *(torch_ex.opmap[name].id for name in _TRANSPARENT_TORCH_OPS if name in torch_ex.opmap),
    }
)


class WeightNames:
    """Names the weights of one jitted function's traces. Remembers the last traces that it was asked about."""

    def __init__(self) -> None:
        self._trace: weakref.ref[TraceCtx] | None = None
        self._producers: dict[str, BoundSymbol] = {}
        self._prologue: weakref.ref[TraceCtx] | None = None
        self._parameters: dict[str, str] = {}
        self._own: dict[str, str] = {}

    def of(self, weight: TensorProxy, trace: TraceCtx, prologue: TraceCtx) -> str | None:
        """Name of ``weight``, a proxy of ``trace``, that is the same in every trace of the function.

        The parameter's fully qualified name (``layers.0.q_proj.weight``) for a module's parameter and for what casts,
        transposes or gathers it; the proxy's own name for an argument of a jitted function; None for a weight that is
        computed from others.
        """
        self._read(trace, prologue)
        while weight.name not in self._parameters:
            producer = self._producers.get(weight.name)
            if producer is None or producer.sym.id is prims.PrimIDs.UNPACK_TRIVIAL:
                return weight.name
            source = next((p for p in producer.flat_proxy_args if isinstance(p, TensorProxy)), None)
            if producer.sym.id not in _TRANSPARENT_IDS or source is None or source.name == weight.name:
                return None
            weight = source
        return self._parameters[weight.name]

    def parameters(self, trace: TraceCtx, prologue: TraceCtx) -> dict[str, str]:
        """By proxy of ``trace``, the name of each parameter and buffer that is used."""
        self._read(trace, prologue)
        return self._parameters

    def own_parameters(self, trace: TraceCtx, prologue: TraceCtx) -> dict[str, str]:
        """By proxy of ``trace``, the name in the jitted module of each of its own parameters and buffers that is used.

        Those of another module that the function closes over are not among them, whatever their names.
        """
        self._read(trace, prologue)
        return self._own

    def is_parameter(self, weight: TensorProxy) -> bool:
        """Whether ``weight``, of the trace last asked about, is a parameter itself, not computed from one."""
        return weight.name in self._parameters

    def _read(self, trace: TraceCtx, prologue: TraceCtx) -> None:
        if self._trace is None or self._trace() is not trace:
            self._trace, self._producers = weakref.ref(trace), {}
            _collect_producers(trace.bound_symbols, self._producers)
        if self._prologue is None or self._prologue() is not prologue:
            self._prologue = weakref.ref(prologue)
            unpacked = [b for b in prologue.bound_symbols if b.sym.id in _UNPACK_IDS and isinstance(b.output, Proxy)]
            functions = {b.output.name for b in prologue.bound_symbols if b.sym.id is prims.PrimIDs.UNPACK_FUNCTION_OBJ}
            modules = (b for b in prologue.bound_symbols if b.sym.id is prims.PrimIDs.UNPACK_THUNDER_MODULE)
            own = {b.output.name for b in modules if b.args[0].name in functions}
            self._own = {b.output.name: b.args[1] for b in unpacked if b.args[0].name in own}
            # A function may use several modules, whose parameters have equal names: the modules' own tell them apart.
            several = len({b.args[0].name for b in unpacked}) > 1
            self._parameters = {
                b.output.name: f"{b.args[0].name}.{b.args[1]}" if several else b.args[1] for b in unpacked
            }


def _collect_producers(bound_symbols: Any, producers: dict[str, BoundSymbol]) -> None:
    for bsym in bound_symbols:
        for out in bsym.flat_proxy_outs:
            producers.setdefault(out.name, bsym)
        if bsym.sym.id not in _TRANSPARENT_IDS:
            _collect_producers(bsym.subsymbols, producers)


def check_parameter_names(fn: Any) -> None:
    """Raise where thunder would take one parameter of a module for another.

    thunder names the proxy of a parameter by its path with dots replaced by underscores, so that ``a.b_c.weight`` and
    ``a_b.c.weight`` get one proxy: it would silently compute with the first one's values for both.

    Raises:
        ValueError: two different parameters or buffers of the module ``fn`` get the same proxy.
    """
    if not isinstance(fn, torch.nn.Module):
        return
    seen: dict[str, tuple[str, torch.Tensor]] = {}
    for kind in (fn.named_parameters, fn.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            proxy = name.replace(".", "_")
            other, its_tensor = seen.setdefault(proxy, (name, tensor))
            if its_tensor is not tensor:
                raise ValueError(
                    f"thunder gives {other!r} and {name!r} the same name in its traces (t_{proxy}) and would use "
                    f"one's values for both; rename one of these submodules or attributes"
                )
