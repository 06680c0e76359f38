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
from thunder.core.dtypes import to_torch_dtype
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor, OperatorExecutor, register_executor

from thunder_te_exec import forward_context, symbols
from thunder_te_exec.claim import decide
from thunder_te_exec.linear import Fp8ForwardContext, Fp8Linear, fp8_linear_backward, make_sync
from thunder_te_exec.passes import PASSES
from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.recipe import DelayedScaling, TensorRole, fp8_dtype
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import AmaxGroup, Fp8State, LinearKey
from thunder_te_exec.symbols import Wanted, is_te_linear

__all__ = ["te_ex"]


class TransformerEngineExecutor(OperatorExecutor, FusionExecutor):
    """Claims linears as an operator executor, and rewrites the joint trace as a fusion executor.

    thunder calls ``fusion_pass`` after autograd and before it splits forward from backward, on every fusion executor
    of the list; it fuses nothing of its own.
    """

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return False

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        if not any(is_te_linear(bsym) for bsym in trace.bound_symbols):
            return trace
        for run in PASSES:
            trace = run(trace)
        return bind(trace)


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
for _symbol in (te_linear, te_functional_linear_backward):
    te_ex.opmap[_symbol.name] = _symbol


# --- claiming ---------------------------------------------------------------------------------------------------------


def _checker(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> bool:
    claim = decide(a, w, bias)
    return claim is not None and claim.claimed


def _inference(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    out, _, _ = te_linear(a, w, bias, **Wanted(False, False, False).kwargs())
    return out


def _training(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None = None) -> TensorProxy:
    # Every gradient is asked for here: which are wanted is known when the joint trace is complete.
    wanted = Wanted(True, True, bias is not None).kwargs()
    out, saved, ctx = te_linear(a, w, bias, **wanted)
    b_shape = None if bias is None else tuple(bias.shape)
    grads = te_functional_linear_backward(
        tuple(a.shape), tuple(w.shape), b_shape, ctx, saved, get_grad(out), **wanted
    )
    for tensor, grad in zip((a, w, bias), grads):
        if tensor is not None:
            put_grad(tensor, grad)
    return out


# Where nothing wants a gradient thunder offers the composite to executors, elsewhere the primitive.
for _linear in (prims.linear, ltorch.linear):
    te_ex.register_implementation(
        _linear, checker=_checker, execution_transform=_inference, grad_transform=_training
    )


# thunder differentiates detach by torch's autograd: it computes zeros, and every gradient before it from them.
_detach = te_ex.register_operator("detach", like=ltorch.detach, fn=torch.Tensor.detach)
te_ex.register_implementation(ltorch.detach, _detach, grad_transform=_detach)


# --- binding ----------------------------------------------------------------------------------------------------------


def bind(trace: TraceCtx) -> TraceCtx:
    """Give every numbered linear of ``trace``, and the scale updates, what they run. No rewrite: only what is called."""
    cd, cs = compat.current_compilation()
    state = Fp8State.of(cd)
    linears = [b for b in trace.bound_symbols if is_te_linear(b)]
    device = to_torch_device(linears[0].args[0].device)
    settings = Settings.current(cd, device)

    uses: dict[str, int] = {}
    keys: dict[str, LinearKey] = {}  # by symbol name: a recomputation has the name of its first run
    for bsym in linears:
        if bsym.sym.name not in keys:
            weight = state.names.of(bsym.args[1], trace, cs.last_prologue_traces[-1])
            uses[weight] = uses.get(weight, -1) + 1
            keys[bsym.sym.name] = LinearKey(weight, uses[weight])
    first_run = {b.sym.name: b for b in reversed(linears)}
    slots, forward_groups, backward_groups = _slots(state, settings.recipe, keys, first_run)
    ops = {
        name: Fp8Linear(
            settings.backend,
            settings.recipe,
            slots.get(name),
            to_torch_device(bsym.args[0].device),
            to_torch_dtype(bsym.args[0].dtype),
        )
        for name, bsym in first_run.items()
    }
    context = Fp8ForwardContext(settings, cd.compile_options.get("te_fp8_recipe"), device, forward_groups)
    sync = make_sync(settings, backward_groups, forward=False)

    def bound(bsym: BoundSymbol) -> BoundSymbol:
        if is_te_linear(bsym):
            forward = BoundSymbolTag.BACKWARD not in bsym.tags
            return bsym.from_bsym(
                sym=_bound(bsym.sym, ops[bsym.sym.name]),
                _import_ctx={"transformer_engine": forward_context} if forward else {},
                _object_ctx={"te_fp8_recipe": context} if forward else {},
            )
        if bsym.sym == symbols.te_sync_fp8_meta_bwd:
            return bsym.from_bsym(sym=_bound(bsym.sym, sync))
        return bsym

    return with_bound_symbols(trace, map(bound, trace.bound_symbols), "Binding of FP8 linears")


def _slots(
    state: Fp8State, recipe: Any, keys: dict[str, LinearKey], linears: dict[str, BoundSymbol]
) -> tuple[dict[str, Any], list[AmaxGroup], list[AmaxGroup]]:
    """Delayed-scaling state: slots by symbol name, and the groups of forward and of backward tensors."""
    if not isinstance(recipe, DelayedScaling):
        return {}, [], []
    by_role: list[list[Any]] = []
    groups: dict[bool, list[AmaxGroup]] = {}
    for roles in ((TensorRole.INPUT, TensorRole.WEIGHT), (TensorRole.GRAD_OUTPUT,)):
        tensors = [
            (keys[name], role, fp8_dtype(recipe, role), to_torch_device(bsym.args[0].device))
            for role in roles
            for name, bsym in linears.items()
        ]
        slots, groups[roles[0].forward] = state.delayed_scaling_slots(tensors, recipe.amax_history_len)
        by_role += [slots[i * len(linears) : (i + 1) * len(linears)] for i in range(len(roles))]
    return dict(zip(linears, zip(*by_role))), groups[True], groups[False]
