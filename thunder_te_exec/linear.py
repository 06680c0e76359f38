"""What a claimed linear runs: forward, backward, and the FP8 context of a forward.

Everything that can be looked up is looked up when these objects are made, at compile time. A call quantizes and
multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_te_exec.recipe import Gemm, TensorRole, fp8_dtype, use_split_accumulator
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import AmaxGroup, AmaxSlot
from thunder_te_exec.symbols import Wanted

__all__ = ["Fp8ForwardContext", "Fp8Linear", "ScaleUpdate", "fp8_linear_backward"]

Saved = tuple[torch.Tensor, ...]
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Fp8Linear:
    """The implementation of one ``te_linear_N``, and the context that its backward gets.

    Args:
        settings: backend and recipe.
        slots: delayed-scaling state of the input, the weight and the output's gradient; empty under current scaling.
        device: of all operands.
        dtype: of the input, the weight, the bias, the output and all gradients.
    """

    def __init__(
        self, settings: Settings, slots: dict[TensorRole, AmaxSlot], device: torch.device, dtype: torch.dtype
    ) -> None:
        backend, recipe = settings.backend, settings.recipe

        def quantizer(role: TensorRole, rowwise: bool, columnwise: bool) -> Any:
            return backend.quantizer(recipe, role, slots.get(role), device, rowwise=rowwise, columnwise=columnwise)

        def gemm(which: Gemm, a: TensorRole, b: TensorRole) -> Any:
            split = use_split_accumulator(recipe, which)
            return backend.gemm(fp8_dtype(recipe, a), fp8_dtype(recipe, b), dtype, use_split_accumulator=split)

        # Indexed by whether the gradient that reads the column-wise copy is wanted.
        self._quantize_input = [quantizer(TensorRole.INPUT, True, columnwise) for columnwise in (False, True)]
        self._quantize_weight = [quantizer(TensorRole.WEIGHT, True, columnwise) for columnwise in (False, True)]
        # Indexed by whether dgrad and whether wgrad is wanted.
        self._quantize_grad = {
            (dgrad, wgrad): quantizer(TensorRole.GRAD_OUTPUT, dgrad, wgrad)
            for dgrad, wgrad in ((True, False), (False, True), (True, True))
        }
        self._fprop = gemm(Gemm.FPROP, TensorRole.INPUT, TensorRole.WEIGHT)
        self._dgrad = gemm(Gemm.DGRAD, TensorRole.GRAD_OUTPUT, TensorRole.WEIGHT)
        self._wgrad = gemm(Gemm.WGRAD, TensorRole.GRAD_OUTPUT, TensorRole.INPUT)

    def __call__(
        self,
        a: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        input_requires_grad: bool,
        weight_requires_grad: bool,
        bias_requires_grad: bool,
    ) -> tuple[torch.Tensor, Saved, Fp8Linear | None]:
        """``a @ w.T + bias``, what its wanted gradients need (``symbols.saved_layout``), and the context."""
        x = self._quantize_input[weight_requires_grad](_matrix(a))
        q = self._quantize_weight[input_requires_grad](w.contiguous())
        out = self._fprop(x.rowwise, x.scale_inv, q.rowwise, q.scale_inv, bias)
        saved: Saved = (x.columnwise, x.scale_inv) if weight_requires_grad else ()
        if input_requires_grad:
            saved += (q.columnwise, q.scale_inv)
        differentiated = input_requires_grad or weight_requires_grad or bias_requires_grad
        return out.view(*a.shape[:-1], w.shape[0]), saved, self if differentiated else None

    def backward(self, a_shape: Sequence[int], saved: Saved, grad_output: torch.Tensor, wanted: Wanted) -> Grads:
        """The wanted gradients of input, weight and bias, from what forward saved."""
        g = _matrix(grad_output)
        grad_input = grad_weight = None
        if wanted.quantizes_grad_output:
            q = self._quantize_grad[wanted.input, wanted.weight](g)
            if wanted.input:
                weight, weight_scale_inv = saved[-2:]
                grad_input = self._dgrad(q.rowwise, q.scale_inv, weight, weight_scale_inv, None).view(a_shape)
            if wanted.weight:
                x, x_scale_inv = saved[:2]
                grad_weight = self._wgrad(q.columnwise, q.scale_inv, x, x_scale_inv, None)
        return grad_input, grad_weight, g.sum(dim=0) if wanted.bias else None


def _matrix(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1]).contiguous()


def fp8_linear_backward(
    a_shape: Sequence[int],
    w_shape: Sequence[int],
    b_shape: Sequence[int] | None,
    ctx: Fp8Linear,
    saved: Saved,
    grad_output: torch.Tensor,
    *,
    input_requires_grad: bool,
    weight_requires_grad: bool,
    bias_requires_grad: bool,
) -> Grads:
    """The implementation of ``te_functional_linear_backward``."""
    wanted = Wanted(input_requires_grad, weight_requires_grad, bias_requires_grad)
    return ctx.backward(a_shape, saved, grad_output, wanted)


class ScaleUpdate:
    """Takes the amaxes of one group into its scales; under a recipe that reduces them, over all processes."""

    def __init__(self, settings: Settings, group: AmaxGroup) -> None:
        self._recipe, self._backend = settings.recipe, settings.backend
        self._process_group = settings.amax_reduction_group
        self._group = group

    def __call__(self) -> None:
        if self._recipe.reduce_amax and _is_distributed(self._process_group):
            torch.distributed.all_reduce(
                self._group.history[0], op=torch.distributed.ReduceOp.MAX, group=self._process_group
            )
        self._backend.update_scales(self._group, self._recipe)


def _is_distributed(process_group: Any) -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1


class Fp8ForwardContext:
    """The FP8 context that a forward trace runs in; the trace shows it as ``te_fp8_recipe``.

    On exit it updates the forward's scales. That the recipe is the active one was seen to when thunder chose the trace
    (``thunder_te_exec.cache``).
    """

    def __init__(self, updates: Sequence[ScaleUpdate]) -> None:
        self._updates = tuple(updates)

    def decorate(self, computation: Callable[..., Any]) -> Callable[..., Any]:
        """``computation`` inside this context."""

        @functools.wraps(computation)
        def in_fp8(*args: Any, **kwargs: Any) -> Any:
            out = computation(*args, **kwargs)
            # As te.autocast: what runs without gradients does not move the scales.
            if torch.is_grad_enabled():
                for update in self._updates:
                    update()
            return out

        return in_fp8
