"""A jitted module as Transformer Engine captures it, and what its capture leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_te_exec import compat
from thunder_te_exec.autocast import active_context, entered
from thunder_te_exec.checkpoint import fp8_state_kept
from thunder_te_exec.delayed_wgrad import DelayedWgrad
from thunder_te_exec.pins import Pin
from thunder_te_exec.state import Fp8State

__all__ = ["GraphedLayer", "Wgrads", "left_as_they_were"]

#: Parameters, and the tensors that a graph writes their gradients to.
Wgrads = list[tuple[torch.nn.Parameter, torch.Tensor]]


class GraphedLayer:
    """One of the callables that graphs are made of.

    Args:
        module: jitted.
        name: what messages call it.
        delay_wgrad: whether its weight gradients are to have graphs of their own.

    Attributes:
        differentiable: whether it has a backward.
        waits: whether that leaves weight gradients.
        captured: what the graphs of weight gradients write to, for each microbatch.

    Raises:
        TypeError: ``module`` is no jitted module.
        ValueError: it has hooks, graphs of another kind, gradients that wait, or another ``te_delay_wgrad``.
    """

    def __init__(self, module: Any, name: str, *, delay_wgrad: bool) -> None:
        try:
            of_parts = compat.all_compile_data(module)
        except TypeError as e:
            raise TypeError(f"{name}: {e}") from None
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"{name}: expected a jitted module, got {type(module).__name__}: jit the module")
        delays = any(compile_data.compile_options.get("te_delay_wgrad") is True for compile_data in of_parts)
        if delays is not delay_wgrad:
            raise ValueError(f"{name}: jitted with te_delay_wgrad={delays}, and delay_wgrad={delay_wgrad} was given")
        if any(compat.makes_cuda_graphs(compile_data) for compile_data in of_parts):
            raise ValueError(f"{name}: jitted with a CUDAGraphTransform, which makes graphs of its own: jit it without")
        _check_hooks(module, name)
        self.module, self.differentiable, self.waits = module, False, False
        self.captured: list[Wgrads] = []
        self._name, self._states = name, [Fp8State.of(compile_data) for compile_data in of_parts]
        self._context = active_context()
        self._wgrads = DelayedWgrad(module) if delay_wgrad else None
        if self._wgrads is not None and self._wgrads.need_backward_dw():
            raise ValueError(f"{name}: weight gradients wait: call its backward_dw() before graphs are captured")

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
        """Compile for these arguments, by a run whose gradients go nowhere.

        Raises:
            ValueError: something is not on a CUDA device, or a tensor's number is read in Python.
        """
        leaves = [t for t in (*tree_leaves((args, kwargs)), *self.parameters()) if isinstance(t, torch.Tensor)]
        for device in {t.device for t in leaves}:
            if device.type != "cuda":
                raise ValueError(f"{self._name}: expected tensors on a CUDA device alone, got one on {device}")
            compat.prepare_autograd_thread(device)
        outputs = [o for o in tree_leaves(self(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad]
        number = compat.number_read_on_host(self.module)
        if number:
            raise ValueError(
                f"{self._name}: reads a tensor's number in Python ({number}), which a CUDA graph cannot; move that out "
                f"of the module, or keep it a tensor"
            )
        inputs = [t for t in leaves if t.requires_grad]
        if self.module.training and outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.zeros_like(o) for o in outputs], allow_unused=True)
            self.differentiable = True
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
            self._wgrads.backward_dw()
            if capturing:
                self.captured.append([(p, p.grad) for p in parameters])
        finally:
            for p, grad in zip(parameters, before):
                p.grad = grad

    def main_grads(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are added to their ``main_grad``, by name."""
        fuses = any(cd.compile_options.get("te_fuse_wgrad_accumulation") for cd in compat.all_compile_data(self.module))
        named = self.module.named_parameters() if fuses else ()
        return {n: p for n, p in named if p.requires_grad and getattr(p, "main_grad", None) is not None}

    def pins(self) -> list[tuple[str, Any, str, Pin]]:
        """Each parameter and buffer: its name, where it is looked up, and how the capture found it."""
        kept = {state.full_name(key.weight) for state in self._states for key, *_ in state.weights}
        return [
            (name, places, key, Pin.of(places[key], quantized_once=name in kept and not places[key].requires_grad))
            for name, places, key in compat.tensor_places(self.module)
        ]

    def release(self) -> None:
        """Let go of what graphs write."""
        self.captured = []


def _check_hooks(module: torch.nn.Module, name: str) -> None:
    refused = (
        "which replays would not call, or a capture would: remove it, and put it on what calls the graphed callable"
    )
    for inner_name, inner in module.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if getattr(inner, kind):
                inner_name = inner_name.removeprefix("_model").removeprefix(".") or "the module"  # as thunder keeps it
                raise ValueError(f"{name}: {inner_name} has a hook ({kind.strip('_')}), {refused}")
    for parameter_name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{name}: the parameter {parameter_name} has a hook, {refused}")


@contextmanager
def left_as_they_were(layers: list[GraphedLayer]) -> Iterator[None]:
    """FP8 state, gradients, ``main_grad``, buffers and random numbers are after this what they were before."""
    of_cuda = {p.device.index for layer in layers for p in layer.parameters() if p.is_cuda}
    with ExitStack() as kept:
        kept.enter_context(torch.random.fork_rng(devices=sorted(of_cuda)))
        for layer in layers:
            kept.enter_context(fp8_state_kept(layer.module))
            kept.enter_context(_tensors_kept(layer))
        yield


@contextmanager
def _tensors_kept(layer: GraphedLayer) -> Iterator[None]:
    grads = [(p, p.grad) for p in layer.parameters()]
    written = [*(p.main_grad for p in layer.main_grads().values()), *layer.module.buffers()]
    before = [t.clone() for t in written]
    try:
        yield
    finally:
        for p, grad in grads:
            p.grad = grad
        for t, numbers in zip(written, before):
            t.copy_(numbers)
