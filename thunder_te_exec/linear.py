"""What a claimed linear runs, in forward and in backward.

Quantizers and GEMMs are looked up when these objects are made, at compile time. A call quantizes and multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from thunder_te_exec.backends import Gemm, Matrix, Operand, Quantize
from thunder_te_exec.calls import Call, Calls
from thunder_te_exec.fp8_weight import Fp8Weight, weight_format
from thunder_te_exec.recipe import Product, TensorRole, quantization_params
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import AmaxGroup, AmaxSlot
from thunder_te_exec.symbols import Wanted
from thunder_te_exec.weight_cache import WeightCache

__all__ = ["Fp8Linear", "fp8_linear_backward", "fp8_linear_dgrad", "fp8_linear_wgrad", "grad_scale"]

Saved = tuple[torch.Tensor, ...]
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class LinearContext(NamedTuple):
    """What ``ctx_te_N`` is at run time: the linear, the call that it ran in, and which copy of the weight was saved."""

    linear: Fp8Linear
    call: Call
    weight_is_rowwise: bool


class _Quantizers:
    """The quantizers of one linear, in one set of slots."""

    def __init__(self, settings: Settings, slots: dict[TensorRole, AmaxSlot], device: torch.device) -> None:
        def make(role: TensorRole, rowwise: bool, columnwise: bool) -> Any:
            return settings.backend.quantizer(
                settings.recipe, role, slots.get(role), device, rowwise=rowwise, columnwise=columnwise
            )

        # Indexed by whether the gradient that reads the column-wise copy is wanted.
        self.input = [make(TensorRole.INPUT, True, columnwise) for columnwise in (False, True)]
        self.weight = [make(TensorRole.WEIGHT, True, columnwise) for columnwise in (False, True)]
        # Indexed by whether dgrad and whether wgrad is wanted.
        self.grad = {
            (dgrad, wgrad): make(TensorRole.GRAD_OUTPUT, dgrad, wgrad)
            for dgrad, wgrad in ((True, False), (False, True), (True, True))
        }


class Fp8Linear:
    """The implementation of one ``te_linear_N``, of its recomputation and of its backward.

    Args:
        settings: backend and recipe.
        slots: delayed-scaling state of the input, the weight and the output's gradient; empty under other recipes.
        device: of all operands.
        dtype: of the input, the weight, the bias, the output and all gradients.
        calls: says which call of the compiled function is running.
        weights: keeps the quantized weight between calls; None quantizes it in each.
    """

    def __init__(
        self,
        settings: Settings,
        slots: dict[TensorRole, AmaxSlot],
        device: torch.device,
        dtype: torch.dtype,
        calls: Calls,
        weights: WeightCache | None,
    ) -> None:
        self._settings, self._slots, self._device, self._calls = settings, slots, device, calls
        self._weights = weights
        self._stochastic = quantization_params(settings.recipe, TensorRole.GRAD_OUTPUT).stochastic_rounding
        self._quantizers = _Quantizers(settings, slots, device)
        self._weight_format = weight_format(settings.recipe)
        self._scale_invs: dict[tuple[bool, TensorRole], torch.Tensor] = {}
        self._held_scale_inv: torch.Tensor | None = None
        self._fprop, self._dgrad, self._wgrad = (settings.backend.gemm(settings.recipe, p, dtype) for p in Product)
        self._wgrads_into: dict[torch.dtype, Gemm] = {}

    def __call__(
        self,
        a: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        input_requires_grad: bool,
        weight_requires_grad: bool,
        bias_requires_grad: bool,
        accumulate: torch.Tensor | None = None,
        quantized_input: Operand | None = None,
    ) -> tuple[torch.Tensor, Saved, LinearContext]:
        """``a @ w.T + bias``, what its wanted gradients need (``symbols.saved_operands``), and the context.

        ``accumulate`` is added, and becomes the result in place. ``quantized_input`` is what ``a`` was quantized to.
        """
        again = self._calls.repeated
        x = quantized_input
        if x is None:
            x = self._quantizers_of_forward(again).input[weight_requires_grad](_matrix(a))
        wanted = input_requires_grad, weight_requires_grad
        out, saved, rowwise = self._forward(again, x, a.shape, w, bias, *wanted, accumulate)
        return out, saved, LinearContext(self, self._calls.forward, rowwise)

    def recompute(
        self,
        a: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        first_run: LinearContext,
        *,
        input_requires_grad: bool,
        weight_requires_grad: bool,
        bias_requires_grad: bool,
        accumulate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Saved, LinearContext]:
        """The same again in backward, with the scales of ``first_run`` and recording no amax."""
        x = self._quantizers_of_forward(first_run.call).input[weight_requires_grad](_matrix(a))
        wanted = input_requires_grad, weight_requires_grad
        out, saved, rowwise = self._forward(first_run.call, x, a.shape, w, bias, *wanted, accumulate)
        return out, saved, first_run._replace(weight_is_rowwise=rowwise)

    def backward(
        self,
        ctx: LinearContext,
        a_shape: Sequence[int],
        saved: Saved,
        grad_output: torch.Tensor,
        wanted: Wanted,
        accumulate: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        delay_wgrad: bool = False,
    ) -> Grads:
        """The wanted gradients of input, weight and bias, from what forward saved.

        ``accumulate`` is added to the input's gradient, and becomes it in place. With ``amax``, float32 of each row,
        ``grad_output`` has been quantized, with :meth:`grad_scale`: its bytes. With ``delay_wgrad`` the weight's is
        what :meth:`wgrad` computes it from, and ``saved`` has the weight alone.
        """
        g = _matrix(grad_output)
        grad_input = grad_weight = None
        if wanted.quantizes_grad_output:
            if amax is not None:
                q = self._take_quantized(g, amax, TensorRole.GRAD_OUTPUT, again=bool(ctx.call.backward_scales))
            else:
                quantize = self._quantizers_of_backward(ctx.call).grad[wanted.input, wanted.weight]
                q = self._with_the_same_random_numbers(ctx.call, quantize, g) if self._stochastic else quantize(g)
            # The input's matrix, then the weight's, as far as wanted.
            x = saved[: len(saved) // 2] if wanted.input else saved
            weight = saved[len(saved) // 2 :] if wanted.weight and not delay_wgrad else saved
            if wanted.input:
                if ctx.weight_is_rowwise:
                    weight = self._transpose_weight(weight)
                grad_input = self._dgrad(q.rowwise, weight, None, _as_matrix(accumulate)).view(a_shape)
            if wanted.weight:
                grad_weight = q.columnwise if delay_wgrad else self._wgrad(q.columnwise, x, None)
        return grad_input, grad_weight, g.sum(dim=0) if wanted.bias else None

    def wgrad(self, x: Matrix, q: Matrix, main_grad: torch.Tensor | None) -> torch.Tensor | None:
        """The weight's gradient from column-wise copies of input and gradient; None if it is added to ``main_grad``."""
        if main_grad is None:
            return self._wgrad(q, x, None)
        if main_grad.dtype not in self._wgrads_into:
            gemm = self._settings.backend.gemm(self._settings.recipe, Product.WGRAD, main_grad.dtype)
            self._wgrads_into[main_grad.dtype] = gemm
        self._wgrads_into[main_grad.dtype](q, x, None, main_grad)
        return None

    def _forward(
        self,
        again: Call | None,
        x: Operand,
        a_shape: torch.Size,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        input_requires_grad: bool,
        weight_requires_grad: bool,
        accumulate: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Saved, bool]:
        if isinstance(w, Fp8Weight):
            q = self._held(w)
        elif self._weights is None:
            q = self._quantizers_of_forward(again).weight[input_requires_grad](w.contiguous())
        else:
            quantize = self._quantizers_of_forward(again).weight
            q = self._weights.get(w, input_requires_grad, quantize, self._calls, again=again)
        out = self._fprop(x.rowwise, q.rowwise, bias, _as_matrix(accumulate))
        saved: Saved = x.columnwise if weight_requires_grad else ()
        # A weight that is held in FP8 alone may be held row-wise only: backward transposes it, so that no transposed
        # copy lives from forward to backward.
        rowwise = q.columnwise is None
        if input_requires_grad:
            saved += q.rowwise if rowwise else q.columnwise
        return out.view(*a_shape[:-1], w.shape[0]), saved, rowwise

    def _held(self, w: Fp8Weight) -> Operand:
        q = w.operand_of(self._weight_format)
        if self._weights is not None:
            self._weights.forget()  # what was kept before the weight was held in FP8
        if q.rowwise[1] is not self._held_scale_inv:
            self._held_scale_inv = q.rowwise[1]
            if TensorRole.WEIGHT in self._slots:
                # Where it leaves FP8 again, it is quantized as it was.
                slot = self._slots[TensorRole.WEIGHT]
                slot.scale.copy_(q.rowwise[1].reciprocal())
                slot.group.scale_changed()
        return q

    def quantize_input(
        self,
        a: torch.Tensor,
        *,
        columnwise: bool,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> Operand:
        """The implementation of ``te_quantize_input``, of which this linear is the first reader.

        With ``amax``, float32 of each row, ``a`` has been quantized row-wise, with ``scale``: its bytes.
        """
        again = self._calls.repeated
        if amax is not None:
            return self._take_quantized(_matrix(a), amax, TensorRole.INPUT, again=again is not None)
        return self._quantizers_of_forward(again).input[columnwise](_matrix(a))

    def input_scale(self) -> torch.Tensor:
        """The implementation of ``te_input_scale``: float32 (1,), under delayed scaling."""
        if self._calls.again:
            self._load_replay(self._calls.forward.forward_scales)
        return self._slots_of(self._calls.again)[TensorRole.INPUT].scale

    def grad_scale(self, call: Call) -> torch.Tensor:
        """What a backward of ``call`` quantizes the output's gradient with: float32 (1,), under delayed scaling."""
        self._calls.begin_backward(call)
        self._load_replay(call.backward_scales)
        return self._slots_of(bool(call.backward_scales))[TensorRole.GRAD_OUTPUT].scale

    def begin_backward(self, call: Call) -> None:
        """A CUDA graph of a backward of ``call`` is going to be captured or replayed, in which Python runs nothing."""
        self._calls.begin_backward(call)
        self._load_replay(call.forward_scales)

    def take_noted(self) -> None:
        """Raise the amaxes of its tensors to those that kernels of a fuser computed."""
        for slot in self._slots.values():
            slot.group.take_noted()

    def _take_quantized(self, data: torch.Tensor, amax: torch.Tensor, role: TensorRole, *, again: bool) -> Operand:
        if not again:
            self._slots[role].note(amax)
        if (again, role) not in self._scale_invs:  # a view that is right whenever the scale is
            self._scale_invs[again, role] = self._slots_of(again)[role].scale_inv
        return Operand((data, self._scale_invs[again, role]), None)

    def _quantizers_of_forward(self, again: Call | None) -> _Quantizers:
        """Of a run, or of a second run of the call ``again``: with its scales, recording no amax."""
        if again is None or not self._slots:
            return self._quantizers
        self._load_replay(again.forward_scales)
        return self._replay

    def _quantizers_of_backward(self, call: Call) -> _Quantizers:
        self._calls.begin_backward(call)
        if not call.backward_scales:
            return self._quantizers
        # backward() ran on this call before (retain_graph): the same gradients again, recording no amax.
        self._load_replay(call.backward_scales)
        return self._replay

    def _load_replay(self, scales: dict[AmaxGroup, torch.Tensor]) -> None:
        for group, scale in scales.items():
            group.load_replay(scale)

    def _slots_of(self, again: bool) -> dict[TensorRole, AmaxSlot]:
        return self._replay_slots if again else self._slots

    def _with_the_same_random_numbers(self, call: Call, quantize: Quantize, g: torch.Tensor) -> Operand:
        """``quantize(g)``, which draws in a second backward of one forward what it drew in the first."""
        generator, device = (torch.cuda, (self._device,)) if self._device.type == "cuda" else (torch.random, ())
        now = generator.get_rng_state(*device)
        first = call.random_states.setdefault(self, now)
        if first is now:
            return quantize(g)
        generator.set_rng_state(first, *device)
        try:
            return quantize(g)
        finally:
            generator.set_rng_state(now, *device)

    @functools.cached_property
    def _transpose_weight(self) -> Callable[[Matrix], Matrix]:
        return self._settings.backend.transpose(self._settings.recipe, TensorRole.WEIGHT)

    @functools.cached_property
    def _replay(self) -> _Quantizers:
        return _Quantizers(self._settings, self._replay_slots, self._device)

    @functools.cached_property
    def _replay_slots(self) -> dict[TensorRole, AmaxSlot]:
        return {role: slot.replay for role, slot in self._slots.items()}


def _matrix(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1]).contiguous()


def _as_matrix(t: torch.Tensor | None) -> torch.Tensor | None:
    """A view; what is accumulated into was made by a product, and is contiguous."""
    return None if t is None else t.view(-1, t.shape[-1])


def fp8_linear_backward(
    a_shape: Sequence[int],
    w_shape: Sequence[int],
    b_shape: Sequence[int] | None,
    ctx: LinearContext,
    saved: Saved,
    grad_output: torch.Tensor,
    *,
    input_requires_grad: bool,
    weight_requires_grad: bool,
    bias_requires_grad: bool,
    accumulate: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    delay_wgrad: bool = False,
) -> Grads:
    """The implementation of ``te_functional_linear_backward``."""
    wanted = Wanted(input_requires_grad, weight_requires_grad, bias_requires_grad)
    return ctx.linear.backward(ctx, a_shape, saved, grad_output, wanted, accumulate, amax, delay_wgrad)


#: The implementation of ``te_functional_linear_dgrad``.
fp8_linear_dgrad = functools.partial(fp8_linear_backward, delay_wgrad=True)


def fp8_linear_wgrad(
    ctx: LinearContext, saved: Saved, quantized_grad: Matrix, *, main_grad: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The implementation of ``te_functional_linear_wgrad``."""
    return ctx.linear.wgrad(saved, quantized_grad, main_grad)


def grad_scale(ctx: LinearContext) -> torch.Tensor:
    """The implementation of ``te_grad_scale``."""
    return ctx.linear.grad_scale(ctx.call)
