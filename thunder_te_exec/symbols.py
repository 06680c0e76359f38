"""The symbols that linears are lowered to, their meta functions, and the predicates that passes use.

One linear ``y = a @ w.T + bias`` with ``a`` of shape (..., K), ``w`` (N, K) and M the number of rows of ``a`` flattened
to two dimensions becomes::

    (y, saved, ctx) = te_linear(a, w, bias, input_requires_grad=, weight_requires_grad=, bias_requires_grad=)
    (ga, gw, gb) = te_functional_linear_backward(a.shape, w.shape, bias_shape, ctx, saved, gy, *the same keywords)

Two more keywords are there where a pass has put them. ``accumulate``: a tensor that is added to ``y`` or ``ga``, and
becomes it in place. ``quantized_input``: the quantized ``a``, made once for several linears by ::

    qa = te_quantize_input(a, columnwise=)

Where a fuser's kernel has quantized already, with ``scale = te_input_scale()`` or ``scale = te_grad_scale(ctx)``, the
bytes, uint8, take the place of ``a`` or ``gy``, and ``amax``, float32, has the largest magnitude of each row: a keyword
of ``te_functional_linear_backward`` and of ``te_quantize_input``, whose keyword ``scale`` says which it was.

A linear inside a checkpointed region runs again in backward as its first run did, whose context is ``first_run``::

    (y, saved, ctx) = te_recompute_linear(a, w, bias, first_run, *the same keywords)

Where weight gradients are delayed, the backward is two. In the backward of the function, last before its return::

    (ga, qg, gb) = te_functional_linear_dgrad(a.shape, w.shape, bias_shape, ctx, saved of the weight, gy, *the same)
    te_delay_wgrad(what the delayed programs read, a tuple for each)

and in a delayed program, ``qg`` being the gradient's quantized column-wise copy ::

    gw = te_functional_linear_wgrad(ctx, saved of the input, qg)

which with ``main_grad=`` has no output: it adds to that tensor in place.

What is no claimed linear reads a weight that is held in FP8 alone through ::

    w1 = te_high_precision(w)

The three keywords say which gradients are wanted. ``saved`` holds, in this order and only
as far as wanted, the operands that the gradients need (:func:`saved_operands`). What tensors an operand consists of
depends on the recipe: ``te_linear`` is made for one by :func:`te_linear_saving`.

All symbols here are declared without an executor; ``thunder_te_exec.executor`` gives them what runs. Passes find them
by identity: thunder compares symbols by ``id``, so that ``te_linear_3`` of one trace is still equal to ``te_linear``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from thunder_te_exec import compat  # noqa: F401  (before thunder)

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.executors.torchex import ex as torch_ex

__all__ = [
    "KnownScales",
    "Wanted",
    "ctx_of",
    "is_linear_of_others",
    "is_te_backward",
    "is_te_input_scale",
    "is_te_linear",
    "is_te_quantize",
    "is_te_recompute",
    "is_unclaimed_linear",
    "of_the_executor_of",
    "saved_operands",
    "te_delay_wgrad",
    "te_differentiable_once",
    "te_functional_linear_backward",
    "te_functional_linear_dgrad",
    "te_functional_linear_wgrad",
    "te_grad_scale",
    "te_high_precision",
    "te_input_scale",
    "te_linear",
    "te_linear_saving",
    "te_quantize_input",
    "te_recompute_linear",
    "te_sync_fp8_meta_bwd",
]


class Wanted(NamedTuple):
    """Which gradients of a linear somebody uses."""

    input: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, bsym: BoundSymbol) -> Wanted:
        """The flags of a ``te_linear`` or ``te_functional_linear_backward``."""
        return cls(*(bsym.kwargs[f"{name}_requires_grad"] for name in cls._fields))

    def kwargs(self) -> dict[str, bool]:
        return {f"{name}_requires_grad": value for name, value in zip(self._fields, self)}

    @property
    def quantizes_grad_output(self) -> bool:
        """Whether the gradient of the output is quantized: the bias gradient is a sum in high precision."""
        return self.input or self.weight


class KnownScales(NamedTuple):
    """A tag of a ``te_linear`` whose scales are known before its tensors: the types that these are quantized to."""

    input: torch.dtype
    grad_output: torch.dtype

    @classmethod
    def of(cls, bsym: BoundSymbol) -> KnownScales | None:
        return next((tag for tag in bsym.sym.tags if isinstance(tag, cls)), None)


def saved_operands(saved: Sequence[Any], wanted: Wanted) -> tuple[Any, ...]:
    """Of all saved tensors, those that the wanted gradients read.

    The first half is the input's column-wise copy, which wgrad contracts over rows, the second half the weight's, which
    dgrad contracts over output features (``thunder_te_exec.layouts``).
    """
    half = len(saved) // 2
    return (*(saved[:half] if wanted.weight else ()), *(saved[half:] if wanted.input else ()))


#: ``specs(a_shape, w_shape)``: shape and torch type of every saved tensor, the input's (rows, K) and the weight's shape
#: being given.
SavedSpecs = Callable[[tuple[int, int], tuple[int, int]], Sequence[tuple[tuple[int, ...], torch.dtype]]]


def _linear_meta(specs: SavedSpecs) -> Callable[..., tuple[TensorProxy, tuple[TensorProxy, ...], AnyProxy | None]]:
    def te_linear_meta(
        a: TensorProxy,
        w: TensorProxy,
        bias: TensorProxy | None,
        *,
        input_requires_grad: bool,
        weight_requires_grad: bool,
        bias_requires_grad: bool,
        **_: Any,  # what passes add
    ) -> tuple[TensorProxy, tuple[TensorProxy, ...], AnyProxy | None]:
        wanted = Wanted(input_requires_grad, weight_requires_grad, bias_requires_grad)
        out = TensorProxy(like=a, shape=(*a.shape[:-1], w.shape[0]))
        everything = specs((math.prod(a.shape[:-1]), a.shape[-1]), tuple(w.shape))
        saved = tuple(
            TensorProxy(shape=shape, device=a.device, dtype=dtypes.to_dtype(dtype), requires_grad=False, prefix="s")
            for shape, dtype in saved_operands(everything, wanted)
        )
        return out, saved, AnyProxy(object(), prefix="ctx_te") if any(wanted) else None

    return te_linear_meta


def _per_tensor_specs(a_shape: tuple[int, int], w_shape: tuple[int, int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    scale = ((1,), torch.float32)
    return [(a_shape[::-1], torch.uint8), scale, (w_shape[::-1], torch.uint8), scale]


def _te_functional_linear_backward_meta(
    a_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    b_shape: tuple[int, ...] | None,
    ctx: AnyProxy,
    saved: Sequence[TensorProxy],
    grad_output: TensorProxy,
    *,
    input_requires_grad: bool,
    weight_requires_grad: bool,
    bias_requires_grad: bool,
    **_: Any,  # what passes add
) -> tuple[TensorProxy | None, TensorProxy | None, TensorProxy | None]:
    return (
        TensorProxy(like=grad_output, shape=a_shape) if input_requires_grad else None,
        TensorProxy(like=grad_output, shape=w_shape) if weight_requires_grad else None,
        TensorProxy(like=grad_output, shape=b_shape) if bias_requires_grad else None,
    )


def _without_outputs(*_: Any) -> None:
    return None


def _symbol(name: str, meta: Any, tags: tuple[Any, ...] = ()) -> Symbol:
    return Symbol(name=name, id=f"thunder_te.{name}", meta=meta, is_prim=True, tags=tags)


te_linear = _symbol(
    "te_linear", _linear_meta(_per_tensor_specs), (prims.OpTags.MATMUL_OP, prims.OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD)
)
# Made from a te_linear whose outputs it takes over: it has no meta function.
te_recompute_linear = _symbol("te_recompute_linear", None, (prims.OpTags.MATMUL_OP,))
te_functional_linear_backward = _symbol(
    "te_functional_linear_backward", _te_functional_linear_backward_meta, (prims.OpTags.MATMUL_OP,)
)
# Made from a te_functional_linear_backward whose outputs they take over.
te_functional_linear_dgrad = _symbol("te_functional_linear_dgrad", None, (prims.OpTags.MATMUL_OP,))
te_functional_linear_wgrad = _symbol("te_functional_linear_wgrad", None, (prims.OpTags.MATMUL_OP,))
te_delay_wgrad = _symbol("te_delay_wgrad", _without_outputs, (prims.OpTags.DONT_DCE,))
te_quantize_input = _symbol("te_quantize_input", None)
te_input_scale = _symbol("te_input_scale", None)
te_grad_scale = _symbol("te_grad_scale", None)
te_high_precision = _symbol("te_high_precision", None)
te_sync_fp8_meta_bwd = _symbol("te_sync_fp8_meta_bwd", _without_outputs, (prims.OpTags.DONT_DCE,))
te_differentiable_once = _symbol("te_differentiable_once", _without_outputs, (prims.OpTags.DONT_DCE,))


def of_the_executor_of(bsym: BoundSymbol, symbol: Symbol) -> Symbol:
    """``symbol`` as one that the executor of ``bsym``, a claimed linear, runs."""
    ours = {"executor": bsym.sym.executor, "_bind_postprocess": bsym.sym._bind_postprocess}
    return replace(symbol, **ours, _hash=None)


def te_linear_saving(symbol: Symbol, specs: SavedSpecs, known_scales: KnownScales | None) -> Symbol:
    """``symbol``, a ``te_linear``, for a recipe whose saved tensors are those of ``specs``."""
    tags = symbol.tags if known_scales is None else (*symbol.tags, known_scales)
    return replace(symbol, meta=_linear_meta(specs), tags=tags, _hash=None)


_UNCLAIMED = (prims.linear, ltorch.linear, torch_ex.opmap["linear"])


def is_te_linear(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is the forward of a claimed linear, numbered or not."""
    return bsym.sym == te_linear


def is_linear_of_others(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is a linear that is not claimed, in forward or in backward."""
    return any(bsym.sym == sym for sym in _UNCLAIMED)


def is_unclaimed_linear(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is a linear of the forward, other than a recomputation, that is not claimed."""
    return BoundSymbolTag.BACKWARD not in bsym.tags and is_linear_of_others(bsym)


def is_te_recompute(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is the second run, in backward, of a claimed linear inside a checkpointed region."""
    return bsym.sym == te_recompute_linear


def is_te_quantize(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` quantizes an input for several claimed linears, numbered or not."""
    return bsym.sym == te_quantize_input


def is_te_input_scale(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` gives the scale that the input of a claimed linear is quantized with, numbered or not."""
    return bsym.sym == te_input_scale


def is_te_backward(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is the backward of a claimed linear."""
    return bsym.sym == te_functional_linear_backward


def ctx_of(bsym: BoundSymbol) -> Proxy | None:
    """The context that ties a claimed linear's backward to its forward; None for a forward that nothing refers to."""
    return bsym.args[3] if is_te_backward(bsym) else bsym.output[2]
