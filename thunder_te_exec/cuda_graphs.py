"""CUDA graphs of jitted modules, for a step of one and for a pipeline's schedule."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_te_exec import compat
from thunder_te_exec.autocast import active_context, entered
from thunder_te_exec.backends import te_graphs
from thunder_te_exec.checkpoint import fp8_state_kept
from thunder_te_exec.delayed_wgrad import DelayedWgrad
from thunder_te_exec.pins import Pin
from thunder_te_exec.schedule import Schedule
from thunder_te_exec.state import Fp8State

__all__ = ["GraphedCallable", "make_graphed_callables"]


def make_graphed_callables(
    callables: torch.nn.Module | tuple[torch.nn.Module, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    *,
    sample_kwargs: Any = None,
    order: Sequence[float] | None = None,
    num_layers_per_chunk: Sequence[int] | None = None,
    delay_wgrad: bool = False,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> GraphedCallable | tuple[GraphedCallable, ...]:
    """CUDA graphs of the forward and the backward of jitted modules, and of their delayed weight gradients.

    What is captured is what runs in the FP8 context around this call; a replay runs that, whatever context it is in.
    FP8 state, ``.grad`` and ``main_grad`` are afterwards what they were before; replays move the scales as calls do.
    Graphs share a memory pool: they are to be replayed in the order of ``order``, or forwards first and backwards after
    them in reverse. A replay overwrites the output that the one before it of the same graph gave.

    From Transformer Engine's ``make_graphed_callables`` come the warm-up and the capture of all graphs, in the order of
    the schedule and into one memory pool, the list of parameters among each backward graph's inputs, static buffers,
    and the autograd function that replays. Ours is what it does not do for modules of its own, or for none but these:
    the check of the schedule, of which it lets some pass and captures a graph twice; schedules with delayed weight
    gradients of chunks of several layers, each a chunk to it; compiling before its warm-up; keeping FP8 state; and
    :meth:`GraphedCallable.backward_dw`, whose gradients add to ``.grad`` as autograd's would.

    Args:
        callables: modules that ``thunder.jit`` or ``jit_blocks`` returned, all in training mode or none. With an
            ``order``, the layers of all chunks.
        sample_args: positional arguments, tensors, for each callable; with an ``order``, for each chunk, for each
            microbatch, for each layer of the chunk. Their shapes, types and ``requires_grad`` are those of all replays.
        num_warmup_iters: runs before the capture.
        sample_kwargs: keyword arguments, tensors, a dict for each element of ``sample_args``.
        order: a pipeline's schedule, of chunks that count from 1: ``c`` is a forward of chunk c, ``-c`` its backward,
            and ``-c - 0.5`` the weight gradients of its latest backward.
        num_layers_per_chunk: how many of ``callables`` are in each chunk; None divides them evenly.
        delay_wgrad: the callables were jitted with ``te_delay_wgrad=True``.
        allow_unused_input: an input that requires a gradient need not get one.
        pool: a memory pool, of ``torch.cuda.graph_pool_handle``, to share.

    Returns:
        For each element of ``sample_args`` a callable, in a tuple where ``callables`` is one.

    Raises:
        TypeError: a callable is not a jitted module, or an entry of ``order`` no number.
        ValueError: the numbers of callables, samples and entries of the order do not fit; modules have hooks, are in
            different modes or not on a CUDA device, read a tensor's number in Python, or were jitted with another
            ``te_delay_wgrad``.
        RuntimeError: there is no CUDA device or no Transformer Engine; or a callable does what cannot be captured.
    """
    if not isinstance(callables, tuple):
        kwargs = None if sample_kwargs is None else (sample_kwargs,)
        (graphed,) = make_graphed_callables(
            (callables,),
            (sample_args,),
            num_warmup_iters,
            sample_kwargs=kwargs,
            order=order,
            num_layers_per_chunk=num_layers_per_chunk,
            delay_wgrad=delay_wgrad,
            allow_unused_input=allow_unused_input,
            pool=pool,
        )
        return graphed
    schedule, places = _scheduled(order, len(callables), len(sample_args), num_layers_per_chunk, delay_wgrad)
    kwargs = tuple({} for _ in sample_args) if sample_kwargs is None else tuple(sample_kwargs)
    if len(kwargs) != len(sample_args):
        raise ValueError(f"sample_kwargs: expected {len(sample_args)}, as many as sample_args, got {len(kwargs)}")
    layers = [
        _Layer(module, f"callables[{i}]", delay_wgrad, schedule is not None) for i, module in enumerate(callables)
    ]
    if len({layer.module.training for layer in layers}) > 1:
        raise ValueError("callables: expected all in training mode or none; some are and some are not")
    _check_device()
    of_forwards = [layers[i] for i in (range(len(layers)) if schedule is None else schedule.callables())]
    with ExitStack() as kept:
        for layer in layers:
            kept.enter_context(fp8_state_kept(layer.module))
            kept.enter_context(_main_grads_kept(layer.module))
        with _side_stream():
            for layer, args, kw in zip(of_forwards, sample_args, kwargs):
                layer.prepare(args, kw)
        options: dict[str, Any] = {"allow_unused_input": allow_unused_input, "pool": pool}
        if schedule is not None:
            by_layer = schedule.by_layer([layer.waits for layer in layers]) if delay_wgrad else schedule
            options |= {"_order": list(by_layer.order), "_num_layers_per_chunk": list(by_layer.layers)}
        found = te_graphs.capture(
            layers,
            [sample_args[i] for i in places],
            num_warmup_iters=num_warmup_iters,
            sample_kwargs=tuple(kwargs[i] for i in places),
            **options,
        )
    graphed = dict(zip(places, found))
    microbatch: Counter[int] = Counter()
    callables_of = []
    for i, layer in enumerate(of_forwards):
        wgrads = layer.captured[microbatch[id(layer)]] if layer.waits else None
        microbatch[id(layer)] += 1
        callables_of.append(GraphedCallable(graphed[i], layer, wgrads))
    return tuple(callables_of)


def _scheduled(
    order: Sequence[float] | None, callables: int, samples: int, layers: Sequence[int] | None, delay_wgrad: bool
) -> tuple[Schedule | None, list[int]]:
    """The schedule, and of each forward that is captured, in Transformer Engine's order, its place in the caller's."""
    if order is not None:
        schedule = Schedule.of(order, callables, samples, layers, delay_wgrad)
        return schedule, schedule.places_by_layer() if delay_wgrad else list(range(samples))
    if layers is not None:
        raise ValueError("num_layers_per_chunk: expected with an order, which names the chunks, alone")
    if samples != callables:
        raise ValueError(f"sample_args: expected {callables}, one for each of the callables, got {samples}")
    return None, list(range(samples))


def _check_device() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("make_graphed_callables: CUDA graphs need a CUDA device, and there is none")
    why = compat.te_import_error()
    if why:
        raise RuntimeError(f"make_graphed_callables: it captures with Transformer Engine, and {why}")


@contextmanager
def _side_stream() -> Iterator[None]:
    """What a capture must not find on its own stream runs on another one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def _main_grads_kept(module: torch.nn.Module) -> Iterator[None]:
    """Runs of the weight gradients inside leave no trace in ``main_grad``."""
    fuses = any(cd.compile_options.get("te_fuse_wgrad_accumulation") for cd in compat.all_compile_data(module))
    found = [getattr(p, "main_grad", None) for p in module.parameters() if p.requires_grad] if fuses else []
    kept = [(main_grad, main_grad.clone()) for main_grad in found if main_grad is not None]
    try:
        yield
    finally:
        for main_grad, before in kept:
            main_grad.copy_(before)


class _Layer:
    """One of the callables, as it is captured.

    Attributes:
        module: jitted.
        waits: whether its backward leaves weight gradients.
        captured: for each microbatch, the parameters and the tensors that its graph writes their gradients to.
    """

    def __init__(self, module: Any, name: str, delay_wgrad: bool, in_order: bool) -> None:
        try:
            of_parts = compat.all_compile_data(module)
        except TypeError as e:
            raise TypeError(f"{name}: {e}") from None
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{name}: expected a jitted module, got {type(module).__name__}: jit the module")
        delays = any(compile_data.compile_options.get("te_delay_wgrad") is True for compile_data in of_parts)
        if delays is not delay_wgrad:
            raise ValueError(f"{name}: jitted with te_delay_wgrad={delays}, and delay_wgrad={delay_wgrad} was given")
        _check_hooks(module, name)
        self.module, self.waits = module, False
        self.captured: list[list[tuple[torch.nn.Parameter, torch.Tensor]]] = []
        self._name, self._states = name, [Fp8State.of(compile_data) for compile_data in of_parts]
        self._context = active_context()
        self._wgrads = DelayedWgrad(module) if delay_wgrad else None
        self._in_order, self._operands = in_order, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with entered(self._context):
                return self.module(*args, **kwargs)
        except Exception as e:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{self._name} cannot be captured in a CUDA graph: {e}") from e
            raise

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.module.parameters()

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for these arguments, by a run whose gradients go nowhere."""
        leaves = [t for t in (*tree_leaves((args, kwargs)), *self.parameters()) if isinstance(t, torch.Tensor)]
        for device in {t.device for t in leaves}:
            if device.type != "cuda":
                raise ValueError(f"{self._name}: expected tensors on a CUDA device alone, got one on {device}")
            compat.prepare_autograd_thread(device)
        outputs = [o for o in tree_leaves(self(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad]
        inputs = [t for t in leaves if t.requires_grad]
        number = compat.number_read_on_host(self.module)
        if number:
            raise ValueError(
                f"{self._name}: reads a tensor's number in Python ({number}), which a CUDA graph cannot; move that out "
                f"of the module, or keep it a tensor"
            )
        if self.module.training and outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.zeros_like(o) for o in outputs], allow_unused=True)
            self.waits = self.waits or (self._wgrads is not None and self._wgrads.need_backward_dw())
            self.backward_dw()

    def need_backward_dw(self) -> bool:
        return self.waits

    def backward_dw(self) -> None:
        """Compute the weight gradients that wait; a capture keeps where it writes them, and ``.grad`` is as before."""
        if self._wgrads is None:
            return
        parameters = self._wgrads.get_backward_dw_params()
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        capturing = torch.cuda.is_current_stream_capturing()
        try:
            if capturing and not self._in_order:
                # They may be worked off after other backwards, whose graphs would get the memory of the operands.
                self._operands += self._states[0].wgrads.oldest("")
            self._wgrads.backward_dw()
            if capturing:
                self.captured.append([(p, p.grad) for p in parameters])
        finally:
            for p, grad in zip(parameters, before):
                p.grad = grad

    def pins(self) -> list[tuple[str, Pin]]:
        """Where the capture found the parameters, by name."""
        kept = {state.full_name(key.weight) for state in self._states for key, *_ in state.weights}
        named = self.module.named_parameters(remove_duplicate=False)
        return [(name, Pin.of(p, quantized_once=name in kept and not p.requires_grad)) for name, p in named]


def _raise_changed(name: str, pin: Pin) -> None:
    what, instead = "this frozen weight was written to", ""
    if pin.has_moved:
        what, instead = "the parameter has other memory", "write to it in place, or "
    raise RuntimeError(
        f"{name}: {what} since CUDA graphs were captured, which go on reading what was there: {instead}capture again"
    )


def _check_hooks(module: torch.nn.Module, name: str) -> None:
    for inner_name, inner in module.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if getattr(inner, kind):
                inner_name = inner_name.removeprefix("_model").removeprefix(".") or "the module"  # as thunder keeps it
                raise ValueError(
                    f"{name}: {inner_name} has {kind.strip('_').replace('_', ' ')}, which replays "
                    f"would not call: remove them, and register them on what calls the graphed callable"
                )


class GraphedCallable:
    """Replays the graphs of one callable for one microbatch: its forward when it is called, its backward in autograd's.

    In another mode than it was captured in, of training and evaluation, the callable itself runs.
    """

    def __init__(
        self, replay: Any, layer: _Layer, wgrads: list[tuple[torch.nn.Parameter, torch.Tensor]] | None
    ) -> None:
        self._replay, self._pins, self._wgrads = replay, layer.pins(), wgrads
        found = ((p, getattr(p, "main_grad", None)) for p in layer.parameters()) if wgrads is not None else ()
        self._main_grads = [(weakref.ref(p), m.data_ptr()) for p, m in found if m is not None]
        self._hooks: list[Callable[[], None]] = []
        self._waits = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the callable returns, in memory that the next call writes to.

        Raises:
            RuntimeError: a parameter that the graphs read was moved, or, of a frozen one, written to since; or the
                weight gradients of the last backward still wait, whose operands the call would write to.
        """
        for name, pin in self._pins:
            if pin.has_moved or pin.was_written_to:
                _raise_changed(name, pin)
        if self._waits:
            raise RuntimeError("weight gradients of this callable's last backward wait: call backward_dw() first")
        out = self._replay(*args, **kwargs)
        if self._wgrads is not None:
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.requires_grad:
                    t.register_hook(self._note_backward)
        return out

    def _note_backward(self, _: torch.Tensor) -> None:
        self._waits = True

    def need_backward_dw(self) -> bool:
        """Whether a backward left weight gradients that wait."""
        return self._waits

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight gradients that the last backward left, then call the hooks; nothing where none wait.

        Raises:
            RuntimeError: a ``main_grad`` has other memory than when graphs were captured.
        """
        if not self._waits:
            return
        for parameter, address in self._main_grads:
            if (p := parameter()) is not None and getattr(p, "main_grad", p).data_ptr() != address:
                raise RuntimeError(
                    "main_grad has other memory than when CUDA graphs were captured: write to it in place"
                )
        self._replay.backward_dw()
        self._waits = False
        for p, grad in self._wgrads or ():
            if p.requires_grad and p.grad is None:
                p.grad = grad.clone()
            elif p.requires_grad:
                p.grad.add_(grad)
        for hook in self._hooks:
            hook()

    def get_backward_dw_params(self) -> list[torch.nn.Parameter]:
        """The parameters whose ``.grad`` the next :meth:`backward_dw` sets; none where nothing waits."""
        return [p for p, _ in self._wgrads or () if p.requires_grad] if self._waits else []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after each :meth:`backward_dw` that worked something off, in order."""
        self._hooks.append(hook)

    def reset(self) -> None:
        """Let go of the graphs and their memory; it cannot be called any more."""
        self._replay.reset()
        self._pins, self._wgrads, self._main_grads, self._waits = [], None, [], False
