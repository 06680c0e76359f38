"""The executor: lowers linears to FP8 symbols, runs the passes, and binds symbols to what they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thunder_te_exec import compat

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor, OperatorExecutor, register_executor

from thunder_te_exec import symbols
from thunder_te_exec.binding import bind, linear_keys
from thunder_te_exec.claim import decide, note_linears_of_others
from thunder_te_exec.fp8_weight import Fp8Weight, in_high_precision
from thunder_te_exec.layouts import TensorSpec, operand_specs
from thunder_te_exec.linear import fp8_linear_backward, fp8_linear_dgrad, fp8_linear_wgrad
from thunder_te_exec.passes import OPTIMIZATIONS, PASSES, adjacent_linears, recomputed_activations
from thunder_te_exec.passes.delayed_wgrad import delayed_wgrad
from thunder_te_exec.passes.high_precision_weights import high_precision_weights
from thunder_te_exec.passes.patterns import writes_in_place
from thunder_te_exec.recipe import DelayedScaling, TensorRole, fp8_dtype
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import Fp8State
from thunder_te_exec.symbols import KnownScales, Wanted, is_te_linear
from thunder_te_exec.wgrad_queue import WgradProgram, WgradSlot

__all__ = ["te_ex"]


class TransformerEngineExecutor(OperatorExecutor, FusionExecutor):
    """Claims linears as an operator executor, and rewrites the joint trace as a fusion executor.

    thunder calls ``fusion_pass`` after autograd and before it splits forward from backward, on every fusion executor
    of the list; it fuses nothing of its own.
    """

    def can_execute(self, bsym: BoundSymbol) -> bool:
        # A linear that a user's autograd.Function calls in its backward multiplies gradients: it is no forward linear.
        in_backward = BoundSymbolTag.BACKWARD in bsym.tags and BoundSymbolTag.RECOMPUTE_IN_BACKWARD not in bsym.tags
        return not in_backward and super().can_execute(bsym)

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return False

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        if compat.current_compilation()[0] is None:
            return trace  # no jitted function that state could belong to
        note_linears_of_others(trace)
        keys = linear_keys(trace)
        held = _held_in_fp8(trace)
        if held:
            trace = high_precision_weights(trace, held, te_high_precision)
        for run in _passes_for(trace):
            trace = run(trace)
        trace, wgrads = _without_delayed_wgrads(trace)
        ours = any(is_te_linear(b) or b.sym == symbols.te_differentiable_once for b in trace.bound_symbols)
        return bind(trace, keys, _bound, wgrads) if ours else trace


def _passes_for(trace: TraceCtx) -> tuple[Callable[[TraceCtx], TraceCtx], ...]:
    left_out: set[Callable[[TraceCtx], TraceCtx]] = set()
    if not any(map(is_te_linear, trace.bound_symbols)) or any(map(writes_in_place, trace.bound_symbols)):
        left_out.update(OPTIMIZATIONS)
    if not Settings.recomputes_activations():
        # In that order of linears thunder would save what one region of a fuser makes and another could compute again.
        left_out.update((recomputed_activations, adjacent_linears))
    return tuple(run for run in PASSES if run not in left_out)


def _without_delayed_wgrads(trace: TraceCtx) -> tuple[TraceCtx, tuple[WgradProgram, ...]]:
    """``trace`` without the weight gradients that the user wants to wait, and what computes these."""
    fuses = Settings.fuses_wgrad_accumulation()
    cd, cs = compat.current_compilation()
    module = compat.jitted_module(cd)
    if module is None or not Settings.delays_wgrad():
        return trace, ()
    state = Fp8State.of(cd)
    own = {n: p for n, p in module.named_parameters(remove_duplicate=False) if not state.is_used_elsewhere(p)}
    names = state.names.own_parameters(trace, cs.last_prologue_traces[-1])
    first: dict[int, str] = {}  # a tied parameter has several names
    names = {proxy: first.setdefault(id(own[name]), name) for proxy, name in names.items() if name in own}
    fused = {p for p, name in names.items() if fuses and getattr(own[name], "main_grad", None) is not None}
    trace, parts = delayed_wgrad(trace, names, fused, te_functional_linear_dgrad, te_functional_linear_wgrad)
    others = [ex for ex in cd.executors_list if ex is not te_ex]
    programs = []
    for part in parts:
        run = compat.executable(part.trace, others)
        slots = (
            WgradSlot(names[p], p in fused if fuses and p in part.of_weights else None, p in part.fresh)
            for p in part.parameters
        )
        programs.append(WgradProgram(run.python_callable(include_decorators=False), tuple(slots), run))
    state.wgrad_traces = tuple(program.trace for program in programs)
    return trace, tuple(programs)


def _held_in_fp8(trace: TraceCtx) -> frozenset[str]:
    """The proxies of the weights that are held in FP8 alone now."""
    cd, cs = compat.current_compilation()
    if not isinstance(cd.fn, torch.nn.Module):
        return frozenset()
    held = {name for name, p in cd.fn.named_parameters(remove_duplicate=False) if isinstance(p, Fp8Weight)}
    names = Fp8State.of(cd).names.parameters(trace, cs.last_prologue_traces[-1]) if held else {}
    return frozenset(proxy for proxy, name in names.items() if name in held)


te_ex = TransformerEngineExecutor("thunder_te")
register_executor(te_ex)


def _bound(symbol: Symbol, fn: Callable[..., Any] | None) -> Symbol:
    """``symbol`` as one of this executor's, running ``fn``; what a symbol calls is set on each of its uses."""

    def set_call(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {bsym.sym.name: fn}

    return replace(symbol, executor=te_ex, _bind_postprocess=set_call, _hash=None)


# A te_linear gets what it runs, which holds its state, when the passes are done.
te_linear = _bound(symbols.te_linear, None)
te_functional_linear_backward = _bound(symbols.te_functional_linear_backward, fp8_linear_backward)
te_functional_linear_dgrad = _bound(symbols.te_functional_linear_dgrad, fp8_linear_dgrad)
te_functional_linear_wgrad = _bound(symbols.te_functional_linear_wgrad, fp8_linear_wgrad)
te_high_precision = _bound(symbols.te_high_precision, in_high_precision)
for _symbol in (te_linear, te_functional_linear_backward, te_high_precision):
    te_ex.opmap[_symbol.name] = _symbol


# --- claiming ---------------------------------------------------------------------------------------------------------


def _checker(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> bool:
    claim = decide(a, w, bias)
    return claim is not None and claim.claimed


def _inference(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    out, _, _ = _te_linear(a)(a, w, bias, **Wanted(False, False, False).kwargs())
    return out


def _te_linear(a: TensorProxy) -> Symbol:
    """The ``te_linear`` of the recipe in force for an input ``a``."""
    recipe = Settings.current(compat.current_compilation()[0], to_torch_device(a.device)).recipe

    def specs(a_shape: tuple[int, int], w_shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
        return (
            *operand_specs(recipe, TensorRole.INPUT, a_shape, columnwise=True),
            *operand_specs(recipe, TensorRole.WEIGHT, w_shape, columnwise=True),
        )

    known = None
    if isinstance(recipe, DelayedScaling):
        known = KnownScales(*(fp8_dtype(recipe, role) for role in (TensorRole.INPUT, TensorRole.GRAD_OUTPUT)))
    return symbols.te_linear_saving(te_linear, specs, known)


def _training(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    # Every gradient is asked for here: which are wanted is known when the joint trace is complete.
    wanted = Wanted(True, True, bias is not None).kwargs()
    out, saved, ctx = _te_linear(a)(a, w, bias, **wanted)
    b_shape = None if bias is None else tuple(bias.shape)
    grads = te_functional_linear_backward(tuple(a.shape), tuple(w.shape), b_shape, ctx, saved, get_grad(out), **wanted)
    for tensor, grad in zip((a, w, bias), grads):
        if tensor is not None:
            put_grad(tensor, grad)
    return out


# Where nothing wants a gradient thunder offers the composite to executors, elsewhere the primitive.
for _linear in (prims.linear, ltorch.linear):
    te_ex.register_implementation(_linear, checker=_checker, execution_transform=_inference, grad_transform=_training)


# --- detach -----------------------------------------------------------------------------------------------------------

# thunder differentiates detach by torch's autograd: it computes zeros, and every gradient before it from them. Here
# nothing flows back: y = detach(x) puts no gradient.
_detach = te_ex.register_operator("detach", like=ltorch.detach, fn=torch.Tensor.detach)
te_ex.register_implementation(ltorch.detach, _detach, grad_transform=_detach)
