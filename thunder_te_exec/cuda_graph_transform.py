"""thunder's ``CUDAGraphTransform`` for traces with FP8 linears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from thunder_te_exec import compat  # noqa: F401  (before thunder)

from thunder.core.proxies import Proxy, ProxyTag
from thunder.core.pytree import tree_flatten
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

    ``thunder.jit(model, executors=[te_ex], transforms=[CUDAGraphTransform()])``. What is returned is a copy of what the
    graph wrote; what thunder's transform of this name returns is overwritten by the next call. FP8 state moves as it
    does without graphs: scales are updated outside of them, once a call. Python runs what ``torch.utils.checkpoint``
    runs again, under delayed scaling a second backward of one call, and where a parameter has other memory or a frozen
    matrix was written to, the next calls, before graphs are captured anew.

    Raises:
        NotImplementedError: while compiling, with ``te_delay_wgrad=True``, whose gradients wait for longer than what
            they are computed from lives; ``make_graphed_callables`` has graphs for them.
        RuntimeError: when called: a tensor is not on a CUDA device; in backward of FP8 linears: the function was called
            again since, and its graph overwrote what this backward needs.
    """

    def __init__(self, *, share_mem_pool: bool = False) -> None:
        super().__init__(share_mem_pool=share_mem_pool)
        self.cuda_graph_runner = _Runner(share_mem_pool=share_mem_pool)
        self._returned: frozenset[str] = frozenset()

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        # These are calls of Python's, once for each backward.
        calls = bsym.sym in (te_sync_fp8_meta_bwd, te_differentiable_once)
        return not calls and not compat.reads_number_on_host(bsym) and super().can_fuse(bsym)

    def fuse(self, region: Region, fusion_counter: int) -> BoundSymbol:
        linears = [bsym for bsym in region.bound_symbols if is_te_linear(bsym)]
        if not linears:
            return self._with_copies(super().fuse(region, fusion_counter))
        # The trace is to run in the FP8 context, and not the region, of which Python runs nothing when it is replayed.
        contexts = {"_import_ctx": linears[0]._import_ctx, "_object_ctx": linears[0]._object_ctx}
        region.bound_symbols = [
            bsym.from_bsym(_import_ctx={}, _object_ctx={}) if is_te_linear(bsym) else bsym
            for bsym in region.bound_symbols
        ]
        fused = self._with_copies(super().fuse(region, fusion_counter))
        (context,) = (c for c in contexts["_object_ctx"].values() if isinstance(c, Fp8ForwardContext))
        self.cuda_graph_runner.contexts[fused.sym.name] = context
        return fused.from_bsym(**contexts)

    def _with_copies(self, fused: BoundSymbol) -> BoundSymbol:
        self.cuda_graph_runner.copied[fused.sym.name] = [o.name in self._returned for o in fused.output]
        return fused

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
        self._returned = _returned(trace)
        new = self.generate_fused_trace(trace, **kwargs)
        if TraceTag.AUGMENTED_FORWARD in new.tags:
            made = {o.name for bsym in new.bound_symbols if bsym.sym.executor is self for o in bsym.flat_proxy_outs}
            made -= self._returned
            saved = get_saved_for_backward_tensors(new)
            self.outputs_from_forward = [o.name in made or ProxyTag.STATIC_MEMORY_LOCATION in o.tags for o in saved]
        return new


def _returned(trace: TraceCtx) -> frozenset[str]:
    """What ``trace`` returns to the caller or to autograd, by name."""
    returned = trace.bound_symbols[-1].args
    if TraceTag.AUGMENTED_FORWARD in trace.tags:
        returned = returned[0]["flat_output"]  # the rest is for thunder and for backward
    return frozenset(o.name for o in tree_flatten(returned)[0] if isinstance(o, Proxy))


class _Graph(NamedTuple):
    """A graph of a region, and what it was captured with.

    Attributes:
        inputs: what it reads; of arguments that are not static, buffers to copy them to.
        outputs: what each replay writes.
        pins: by position, how parameters among the inputs were.
        held: quantized weights that it reads.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Any, ...]
    outputs: Sequence[Any]
    pins: dict[int, Pin]
    held: list[Any]


class _Runner(cudagraph.CUDAGraphRunner):
    """Runs regions: of a trace's forward, whose contexts of linears get the call that is under way, or its backward.

    Attributes:
        contexts: by the name of a region with linears, the FP8 context that its trace runs in.
        copied: by the name of each region, which of its outputs the caller or autograd gets: copies.
    """

    def __init__(self, *, share_mem_pool: bool) -> None:
        super().__init__(share_mem_pool=share_mem_pool)
        self.contexts: dict[str, Fp8ForwardContext] = {}
        self.copied: dict[str, list[bool]] = {}
        self._runs: Counter[Any] = Counter()
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
        runs_again = context is not None and context.runs_again
        if context is not None:
            context.call.graph_replays.pop(fn_name, None)
        if runs_again:
            context.call.graph_replays.clear()  # its backward reads what this run gives
        key = self.make_cache_key(fn_name, *args)
        if self._is_stale(key, args, static):
            del self.cuda_graph_cache[key], self._runs[key]
        if runs_again or any(ctx.call.backward_scales for ctx in linears):
            return fn(*args)
        if key not in self.cuda_graph_cache and self._runs[key] < _WARM_UP:
            self._runs[key] += 1
            # As the graph's own buffers will be, for which a fuser would compile anew while it is captured.
            return fn(*(arg if is_static else _detached(arg) for arg, is_static in zip(args, static)))
        if not all(ctx.call.graph_replays for ctx in linears):
            return fn(*args)  # its forward was run by Python: what it reads is not where a graph's forward writes it
        if key not in self.cuda_graph_cache:
            self.cuda_graph_cache[key] = self._capture(fn, args, static, linears, context)
        return self._replay(fn_name, self.cuda_graph_cache[key], args, linears, context)

    def _is_stale(self, key: Any, args: Sequence[Any], static: Sequence[bool]) -> bool:
        """Whether what the graph of ``key`` reads is not what it would be called with."""
        captured = self.cuda_graph_cache.get(key)
        if captured is None:
            return False
        return any(
            captured.pins[i].change(arg) if i in captured.pins else _has_other_memory(arg, captured.inputs[i])
            for i, (arg, is_static) in enumerate(zip(args, static))
            if is_static and isinstance(arg, torch.Tensor)
        )

    def _capture(
        self,
        fn: Any,
        args: Sequence[Any],
        static: Sequence[bool],
        linears: Sequence[LinearContext],
        context: Fp8ForwardContext | None,
    ) -> _Graph:
        """As thunder's, without runs that would move FP8 state: calls have been the warm-up."""
        _take_noted(linears, context)  # what was noted outside of the graph is not to be read in it
        _begin_backward(linears)
        inputs = tuple(arg if is_static else self.get_static_buffer(arg) for arg, is_static in zip(args, static))
        graph, pool, stream = torch.cuda.CUDAGraph(), None, None
        if self.mem_pool is not None:
            device = next(arg.device for arg in inputs if isinstance(arg, torch.Tensor))
            pool, stream = self.mem_pool[device.index], self.stream[device.index]
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = fn(*inputs)
            _take_noted(linears, context)  # amaxes that a fuser's kernels compute are taken in replays too
        parameters = ((i, arg) for i, arg in enumerate(args) if static[i] and isinstance(arg, torch.nn.Parameter))
        held = [] if context is None else context.held_weights()
        return _Graph(graph, inputs, outputs, {i: _pin(p) for i, p in parameters}, held)

    def _replay(
        self,
        fn_name: str,
        captured: _Graph,
        args: Sequence[Any],
        linears: Sequence[LinearContext],
        context: Fp8ForwardContext | None,
    ) -> Sequence[Any]:
        _begin_backward(linears)
        for to, arg in zip(captured.inputs, args):
            if isinstance(to, torch.Tensor) and _has_other_memory(arg, to):
                to.copy_(arg)
        captured.graph.replay()
        if context is not None:
            self._replays[fn_name] += 1
            context.call.graph_replays[fn_name] = self._replays[fn_name]
        return [_of_this_call(o, context, copy) for o, copy in zip(captured.outputs, self.copied[fn_name])]

    def _check_not_overwritten(self, linears: Sequence[LinearContext]) -> None:
        for fn_name, number in (replay for ctx in linears for replay in ctx.call.graph_replays.items()):
            if number != self._replays[fn_name]:
                raise RuntimeError(
                    "CUDAGraphTransform: backward of a call after which the function was called again, whose graph "
                    "overwrote what the backward needs; call backward first, or make_graphed_callables, which has a "
                    "graph for each microbatch"
                )


def _begin_backward(linears: Sequence[LinearContext]) -> None:
    for ctx in linears:
        ctx.linear.begin_backward(ctx.call)


def _take_noted(linears: Sequence[LinearContext], context: Fp8ForwardContext | None) -> None:
    for ctx in linears:
        ctx.linear.take_noted()
    if context is not None:
        context.take_noted()


def _has_other_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is not b and a.data_ptr() != b.data_ptr()


def _pin(parameter: torch.nn.Parameter) -> Pin:
    return Pin.of(parameter, quantized_once=parameter.ndim == 2 and not parameter.requires_grad)


def _detached(arg: Any) -> Any:
    return arg.detach() if isinstance(arg, torch.Tensor) else arg


def _of_this_call(output: Any, context: Fp8ForwardContext | None, copy: bool) -> Any:
    """``output`` of a graph for one call: autograd writes to a tensor which call it came from."""
    if context is not None and isinstance(output, LinearContext):
        return output._replace(call=context.call)
    return output.clone() if copy else _detached(output)


def _without_call(arg: Any) -> Any:
    return arg._replace(call=None) if isinstance(arg, LinearContext) else arg
