"""thunder's ``CUDAGraphTransform`` for traces with FP8 linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from thunder_te_exec import compat  # noqa: F401  (before thunder)

from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceTag
from thunder.core.vjp_utils import get_saved_for_backward_tensors
from thunder.executors.utils import Region
from thunder.transforms import cudagraph

from thunder_te_exec.linear import LinearContext
from thunder_te_exec.pins import Pin
from thunder_te_exec.scale_updates import Fp8ForwardContext
from thunder_te_exec.symbols import is_te_linear, te_delay_wgrad, te_differentiable_once, te_sync_fp8_meta_bwd

__all__ = ["CUDAGraphTransform"]

#: Calls that Python runs before a graph is captured, so that what is kept between calls has been made.
_WARM_UP = 3


class CUDAGraphTransform(cudagraph.CUDAGraphTransform):
    """Runs the forward and the backward of a jitted function as CUDA graphs, from the fourth call on.

    ``thunder.jit(model, executors=[te_ex], transforms=[CUDAGraphTransform()])``. What thunder's transform of this name
    says holds: outputs are overwritten by the next call. FP8 state moves as it does without graphs: scales are updated
    outside of them, once a call. A second backward of one call, and what ``torch.utils.checkpoint`` runs again, Python
    runs; and the next calls, before graphs are captured anew, where a parameter has other memory or a frozen matrix was
    written to.

    Raises:
        NotImplementedError: while compiling, with ``te_delay_wgrad=True``, whose gradients wait for longer than what
            they are computed from lives; ``make_graphed_callables`` has graphs for them.
        RuntimeError: when called: a tensor is not on a CUDA device; in backward: the function was called again since,
            and its graph overwrote what this backward needs.
    """

    def __init__(self, *, share_mem_pool: bool = False) -> None:
        super().__init__(share_mem_pool=share_mem_pool)
        self.cuda_graph_runner = _Runner(share_mem_pool=share_mem_pool)

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        # These are calls of Python's, once for each backward.
        return bsym.sym not in (te_sync_fp8_meta_bwd, te_differentiable_once) and super().can_fuse(bsym)

    def fuse(self, region: Region, fusion_counter: int) -> BoundSymbol:
        linears = [bsym for bsym in region.bound_symbols if is_te_linear(bsym)]
        if not linears:
            return super().fuse(region, fusion_counter)
        # The trace is to run in the FP8 context, and not the region, of which Python runs nothing when it is replayed.
        contexts = {"_import_ctx": linears[0]._import_ctx, "_object_ctx": linears[0]._object_ctx}
        region.bound_symbols = [
            bsym.from_bsym(_import_ctx={}, _object_ctx={}) if is_te_linear(bsym) else bsym
            for bsym in region.bound_symbols
        ]
        fused = super().fuse(region, fusion_counter)
        (context,) = (c for c in contexts["_object_ctx"].values() if isinstance(c, Fp8ForwardContext))
        self.cuda_graph_runner.contexts[fused.sym.name] = context
        return fused.from_bsym(**contexts)

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """As thunder's, which finds what backward unpacks by its place, where there are tensors alone."""
        if any(bsym.sym == te_delay_wgrad for bsym in trace.bound_symbols):
            raise NotImplementedError(
                "te_delay_wgrad=True with CUDAGraphTransform: the next call overwrites what weight gradients that wait "
                "are computed from; use make_graphed_callables(..., delay_wgrad=True)"
            )
        static = self.outputs_from_forward
        if static is not None and trace.siginfo().name == "backward_fn":
            saved, _ = next(b.output for b in trace.bound_symbols if b.sym.name == "unpack_sequence")
            (tensors,) = (b.output for b in trace.bound_symbols if b.args and b.args[0] is saved and b.output)
            for is_static, proxy in zip(static, tensors, strict=True):
                if is_static:
                    proxy.tags.add(ProxyTag.STATIC_MEMORY_LOCATION)
            self.outputs_from_forward = None
        new = self.generate_fused_trace(trace, **kwargs)
        if TraceTag.AUGMENTED_FORWARD in new.tags:
            made = {o.name for bsym in new.bound_symbols if bsym.sym.executor is self for o in bsym.flat_proxy_outs}
            saved = get_saved_for_backward_tensors(new)
            self.outputs_from_forward = [o.name in made or ProxyTag.STATIC_MEMORY_LOCATION in o.tags for o in saved]
        return new


class _Runner(cudagraph.CUDAGraphRunner):
    """Runs regions: of a trace's forward, whose contexts of linears get the call that is under way, or its backward.

    Attributes:
        contexts: by the name of a region with linears, the FP8 context that its trace runs in.
    """

    def __init__(self, *, share_mem_pool: bool) -> None:
        super().__init__(share_mem_pool=share_mem_pool)
        self.contexts: dict[str, Fp8ForwardContext] = {}
        self._runs: Counter[Any] = Counter()
        self._pins: dict[Any, list[tuple[torch.nn.Parameter, Pin]]] = {}
        self._replays: Counter[str] = Counter()

    def make_cache_key(self, fn_name: str, *args: Any) -> Any:
        return super().make_cache_key(fn_name, *(_without_call(arg) for arg in args))

    def call_cuda_graph(self, fn_name: str, *args: Any) -> Any:
        if any(isinstance(arg, torch.Tensor) and not arg.is_cuda for arg in args):
            raise RuntimeError("CUDAGraphTransform: expected tensors on a CUDA device alone, got one that is not")
        linears = [arg for arg in args if isinstance(arg, LinearContext)]
        self._check_not_overwritten(linears)
        fn, static = self.python_callables[fn_name]
        context = self.contexts.get(fn_name)
        key = self.make_cache_key(fn_name, *args)
        if (context is not None and context.runs_again) or any(ctx.call.backward_scales for ctx in linears):
            return fn(*args)
        parameters = [arg for arg in args if isinstance(arg, torch.nn.Parameter)]
        if any(map(_has_changed, parameters, self._pins.get(key, ()))):
            del self.cuda_graph_cache[key], self._pins[key], self._runs[key]
        if key not in self.cuda_graph_cache and self._runs[key] < _WARM_UP:
            self._runs[key] += 1
            # As the graph's own buffers will be, for which a fuser would compile anew while it is captured.
            return fn(*(arg.detach() if _is_copied(arg, kept) else arg for arg, kept in zip(args, static, strict=True)))
        for ctx in linears:
            ctx.linear.begin_backward(ctx.call)
        if key not in self.cuda_graph_cache:
            self.cuda_graph_cache[key] = self.build_cuda_graph(self._captured(fn, linears, context), args, static)
            self._pins[key] = [(p, _pin(p)) for p in parameters]
        graph, inputs, outputs = self.cuda_graph_cache[key]
        for to, arg in zip(inputs, args, strict=True):
            if isinstance(to, torch.Tensor) and to is not arg and to.data_ptr() != arg.data_ptr():
                to.copy_(arg)
        graph.replay()
        if context is None:
            return outputs
        self._replays[fn_name] += 1
        context.call.replay = fn_name, self._replays[fn_name]
        return [_of_this_call(o, context) for o in outputs]

    def build_cuda_graph(self, fn: Any, args: Sequence[Any], static_args_mask: Sequence[bool]) -> tuple[Any, Any, Any]:
        """As thunder's, without runs that would move FP8 state: calls have been the warm-up."""
        inputs = tuple(
            arg if is_static else self.get_static_buffer(arg) for arg, is_static in zip(args, static_args_mask)
        )
        graph, pool, stream = torch.cuda.CUDAGraph(), None, None
        if self.mem_pool is not None:
            device = next(arg.device for arg in inputs if isinstance(arg, torch.Tensor))
            pool, stream = self.mem_pool[device.index], self.stream[device.index]
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = fn(*inputs)
        return graph, inputs, outputs

    def _captured(self, fn: Any, linears: Sequence[LinearContext], context: Fp8ForwardContext | None) -> Any:
        """``fn``, and what has to be in its graph: amaxes that a fuser's kernels computed are taken in replays too."""

        def captured(*args: Any) -> Any:
            outputs = fn(*args)
            for ctx in linears:
                ctx.linear.take_noted()
            if context is not None:
                context.end_capture()
            return outputs

        return captured

    def _check_not_overwritten(self, linears: Sequence[LinearContext]) -> None:
        for fn_name, number in (ctx.call.replay for ctx in linears if ctx.call.replay is not None):
            if number != self._replays[fn_name]:
                raise RuntimeError(
                    "CUDAGraphTransform: backward of a call after which the function was called again, whose graph "
                    "overwrote what the backward needs; call backward first, or make_graphed_callables, which has a "
                    "graph for each microbatch"
                )


def _pin(parameter: torch.nn.Parameter) -> Pin:
    return Pin.of(parameter, quantized_once=parameter.ndim == 2 and not parameter.requires_grad)


def _has_changed(parameter: torch.nn.Parameter, captured: tuple[torch.nn.Parameter, Pin]) -> bool:
    then, pin = captured
    return parameter is not then or pin.has_moved or pin.was_written_to


def _is_copied(arg: Any, is_static: bool) -> bool:
    return isinstance(arg, torch.Tensor) and not is_static


def _of_this_call(output: Any, context: Fp8ForwardContext) -> Any:
    """``output`` of a graph for one call: autograd writes to a tensor which call it came from."""
    if isinstance(output, LinearContext):
        return output._replace(call=context.call)
    return output.detach() if isinstance(output, torch.Tensor) else output


def _without_call(arg: Any) -> Any:
    return arg._replace(call=None) if isinstance(arg, LinearContext) else arg
