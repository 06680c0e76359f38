"""CUDA graphs of jitted modules, for a step of one and for a pipeline's schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from thunder_te_exec import compat
from thunder_te_exec.backends import te_graphs
from thunder_te_exec.graphed_layer import GraphedLayer, Wgrads, left_as_they_were
from thunder_te_exec.schedule import Replays, Schedule

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
    if isinstance(callables, torch.nn.Module):
        callables, sample_args = (callables,), (sample_args,)
        (graphed,) = make_graphed_callables(
            callables,
            sample_args,
            num_warmup_iters,
            sample_kwargs=None if sample_kwargs is None else (sample_kwargs,),
            order=order,
            num_layers_per_chunk=num_layers_per_chunk,
            delay_wgrad=delay_wgrad,
            allow_unused_input=allow_unused_input,
            pool=pool,
        )
        return graphed
    samples = _samples(callables, sample_args, sample_kwargs, num_warmup_iters)
    schedule = _schedule(order, len(callables), len(samples), num_layers_per_chunk, delay_wgrad)
    layers = [GraphedLayer(module, f"callables[{i}]", delay_wgrad=delay_wgrad) for i, module in enumerate(callables)]
    _check_modes(layers, schedule)
    _check_device()
    of_samples = layers if schedule is None else [layers[i] for i in schedule.callables()]
    with left_as_they_were(layers):
        with _side_stream():
            for layer, (args, kwargs) in zip(of_samples, samples):
                layer.prepare(args, kwargs)
        options = {"num_warmup_iters": num_warmup_iters, "allow_unused_input": allow_unused_input, "pool": pool}
        replay = _captured(layers, samples, schedule, options)
    return _graphed(layers, of_samples, schedule, replay)


def _samples(
    callables: Any, sample_args: Any, sample_kwargs: Any, num_warmup_iters: Any
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each sample's positional and keyword arguments, of arguments that are what they should be."""
    if not isinstance(callables, tuple | list):
        raise TypeError(f"callables: expected a jitted module, or a tuple of them, got {type(callables).__name__}")
    if not callables or len({id(module) for module in callables}) < len(callables):
        raise ValueError("callables: expected one or more, none of them twice")
    if not isinstance(sample_args, tuple | list) or not all(isinstance(args, tuple) for args in sample_args):
        raise TypeError("sample_args: expected a tuple of tensors for one callable, a tuple of such tuples for several")
    kwargs = [{} for _ in sample_args] if sample_kwargs is None else sample_kwargs
    if not isinstance(kwargs, tuple | list) or not all(isinstance(kw, dict) for kw in kwargs):
        raise TypeError("sample_kwargs: expected a dict for one callable, a tuple of dicts for several")
    if len(kwargs) != len(sample_args):
        raise ValueError(f"sample_kwargs: expected {len(sample_args)}, as many as sample_args, got {len(kwargs)}")
    for i, leaf in ((i, t) for i, sample in enumerate(zip(sample_args, kwargs)) for t in tree_leaves(sample)):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"sample_args[{i}]: expected tensors, got {type(leaf).__name__}")
    if not isinstance(num_warmup_iters, int) or num_warmup_iters < 1:
        raise ValueError(f"num_warmup_iters: expected 1 or more, got {num_warmup_iters!r}")
    return list(zip(sample_args, kwargs))


def _schedule(
    order: Any, callables: int, samples: int, layers: Sequence[int] | None, delay_wgrad: bool
) -> Schedule | None:
    if order is not None:
        return Schedule.of(order, callables, samples, layers, delay_wgrad)
    if layers is not None:
        raise ValueError("num_layers_per_chunk: expected with an order, which names the chunks, alone")
    if samples != callables:
        raise ValueError(f"sample_args: expected {callables}, one for each of the callables, got {samples}")
    if delay_wgrad and callables > 1:
        raise ValueError(
            "order: expected one with delay_wgrad=True and several callables, which says where the weight gradients of "
            "each run, for graphs share memory; those of a chain run after it with order=[1, -1, -1.5]"
        )
    return None


def _check_modes(layers: Sequence[GraphedLayer], schedule: Schedule | None) -> None:
    training = {layer.module.training for layer in layers}
    if len(training) > 1:
        raise ValueError("callables: expected all in training mode or none; some are and some are not")
    if schedule is not None and training == {False}:
        raise ValueError("order: a schedule of forwards and backwards is for modules in training mode; call train()")


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
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)


def _captured(
    layers: Sequence[GraphedLayer], samples: Sequence[Any], schedule: Schedule | None, options: dict[str, Any]
) -> list[Any]:
    """What Transformer Engine makes of each sample, in their order."""
    places = list(range(len(samples)))
    if schedule is not None:
        if any(entry % 1 for entry in schedule.order):
            places = schedule.places_by_layer()
            schedule = schedule.by_layer([layer.waits for layer in layers])
        options = options | {"_order": list(schedule.order), "_num_layers_per_chunk": list(schedule.layers)}
    args, kwargs = zip(*(samples[i] for i in places))
    found = dict(zip(places, te_graphs.capture(layers, args, sample_kwargs=kwargs, **options)))
    return [found[i] for i in range(len(samples))]


def _graphed(
    layers: Sequence[GraphedLayer], of_samples: Sequence[GraphedLayer], schedule: Schedule | None, replay: Sequence[Any]
) -> tuple[GraphedCallable, ...]:
    differentiable, waits = [layer.differentiable for layer in layers], [layer.waits for layer in layers]
    if schedule is None:
        events = [("forward", i) for i in range(len(layers))]
        events += [("backward", i) for i in reversed(range(len(layers))) if differentiable[i]]
        events += [("weight gradients", i) for i in range(len(layers)) if waits[i]]  # of one
    else:
        events = schedule.replays(differentiable, waits)
    replays = Replays(events)
    microbatch: Counter[int] = Counter()
    found = []
    for place, layer in enumerate(of_samples):
        wgrads = layer.captured[microbatch[id(layer)]] if layer.waits else None
        microbatch[id(layer)] += 1
        found.append(GraphedCallable(replay[place], layer, wgrads, replays, place))
    return tuple(found)


class _OwnGradient(torch.autograd.Function):
    """The tensor itself, whose gradient is a copy: the next replay writes to what autograd may keep as a ``.grad``."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone()


def _with_own_gradient(t: Any) -> Any:
    return _OwnGradient.apply(t) if isinstance(t, torch.Tensor) and t.requires_grad else t


class GraphedCallable:
    """Replays the graphs of one callable for one microbatch: its forward when it is called, its backward in autograd's.

    In another mode than it was captured in, of training and evaluation, the callable itself runs.
    """

    def __init__(self, replay: Any, layer: GraphedLayer, wgrads: Wgrads | None, replays: Replays, place: int) -> None:
        self._replay, self._layer, self._wgrads = replay, layer, wgrads
        self._replays, self._place = replays, place
        self._training, self._pins = layer.module.training, layer.pins()
        waiting = layer.main_grads() if wgrads is not None else {}
        self._main_grads = [(name, p, p.main_grad.data_ptr()) for name, p in waiting.items()]
        self._hooks: list[Callable[[], None]] = []
        # The number of the call whose weight gradients wait, and what of them has been computed and is to be added.
        self._waits: int | None = None
        self._computed: Wgrads | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the callable returns, in memory that the next call writes to.

        Raises:
            RuntimeError: a parameter or buffer that the graphs read is another one, was moved, frozen or unfrozen, or,
                of a frozen one, written to since; or weight gradients of the last backward wait, whose operands the
                call would write to. In backward: the order of replays is not that of the capture, so that what this
                backward reads has been overwritten.
        """
        if self._layer.module.training is not self._training:
            return self._layer(*args, **kwargs)
        for name, tensors, key, pin in self._pins:
            change = pin.change(tensors.get(key))
            if change:
                raise RuntimeError(
                    f"{name} {change} since CUDA graphs were captured, and they go on reading what was there: write "
                    f"to trained parameters in place, or capture again"
                )
        if self._waits is not None:
            raise RuntimeError("weight gradients of this callable's last backward wait: call backward_dw() first")
        number = self._replays.forward(self._place)
        if torch.is_grad_enabled():
            args, kwargs = tree_map(_with_own_gradient, (args, kwargs))
        out = self._replay(*args, **kwargs)
        nodes = (t.grad_fn for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.grad_fn is not None)
        node = next(nodes, None)
        if node is not None:
            node.register_prehook(lambda _: self._replays.backward(self._place, number))
            if self._wgrads is not None:
                node.register_hook(lambda *_: self._let_wait(number))
        return out

    def _let_wait(self, number: int) -> None:
        self._waits = number

    def need_backward_dw(self) -> bool:
        """Whether a backward left weight gradients that wait."""
        return self._waits is not None

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Compute the weight gradients that the last backward left, then call the hooks; nothing where none wait.

        After an exception the gradients that were not added yet still wait.

        Raises:
            RuntimeError: a ``main_grad`` is another tensor than when graphs were captured, or the order of replays is
                not that of the capture.
        """
        if self._waits is None:
            return
        if self._computed is None:
            for name, p, address in self._main_grads:
                now = getattr(p, "main_grad", None)
                if now is None or now.data_ptr() != address:
                    raise RuntimeError(
                        f"{name}.main_grad: has other memory than when CUDA graphs were captured, which add to the "
                        f"old: write to it in place, or capture again"
                    )
            self._replays.wgrad(self._place, self._waits)
            self._replay.backward_dw()
            self._computed = list(self._wgrads)
        while self._computed:
            p, grad = self._computed[0]
            if p.requires_grad and p.grad is None:
                p.grad = grad.clone()
            elif p.requires_grad:
                p.grad.add_(grad)
            self._computed.pop(0)
        self._computed = self._waits = None
        for hook in self._hooks:
            hook()

    def get_backward_dw_params(self) -> list[torch.nn.Parameter]:
        """The parameters whose ``.grad`` the next :meth:`backward_dw` sets; none where nothing waits."""
        if self._waits is None:
            return []
        return [p for p, _ in (self._wgrads if self._computed is None else self._computed) if p.requires_grad]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after each :meth:`backward_dw` that worked something off, in order.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"register_wgrad_accumulation_and_reduce_hooks: expected a function, got {hook!r}")
        self._hooks.append(hook)

    def reset(self) -> None:
        """Let go of the graphs and their memory; it cannot be called any more."""
        self._replay.reset()
        self._layer.release()
        self._pins, self._main_grads = [], []
        self._wgrads = self._waits = self._computed = None
