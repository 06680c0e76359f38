"""Binding: gives every numbered linear of a trace, and the scale updates, what they run.

The last step of compiling, and the only one that knows state and backends. It rewrites nothing: it sets what symbols
call. Whatever a call would have to look up (recipe, scales, quantizers, GEMM options) is looked up here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_te_exec import compat

from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx

from thunder_te_exec import forward_context
from thunder_te_exec.checkpoint import take_loaded
from thunder_te_exec.layouts import is_transposable
from thunder_te_exec.linear import (
    BackwardSync,
    Calls,
    Fp8ForwardContext,
    Fp8Linear,
    ScaleUpdate,
    differentiable_once,
)
from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.recipe import DelayedScaling, TensorRole, fp8_dtype, has_functions
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import AmaxSlot, Fp8State, LinearKey, SlotKey
from thunder_te_exec.symbols import (
    ctx_of,
    is_te_linear,
    is_te_quantize,
    is_te_recompute,
    is_unclaimed_linear,
    te_differentiable_once,
    te_sync_fp8_meta_bwd,
)
from thunder_te_exec.weight_cache import OptimizerSteps, WeightCache

__all__ = ["bind", "linear_keys"]


def bind(
    trace: TraceCtx, keys_of_outputs: dict[str, LinearKey], bound: Callable[[Symbol, Callable[..., Any]], Symbol]
) -> TraceCtx:
    """Bind the linears and scale updates of ``trace``.

    Args:
        trace: after all passes.
        keys_of_outputs: what :func:`linear_keys` found before them.
        bound: ``bound(symbol, fn)`` gives the symbol that runs ``fn``.
    """
    compile_data, _ = compat.current_compilation()
    state = Fp8State.of(compile_data)
    linears = {b.sym.name: b for b in trace.bound_symbols if is_te_linear(b)}
    keys = {name: keys_of_outputs[bsym.output[0].name] for name, bsym in linears.items()}
    settings = {device: Settings.current(compile_data, device) for device in map(_device, linears.values())}

    recipes = {device: state.index_of_recipe(chosen.recipe) for device, chosen in settings.items()}
    leaders = _leaders(linears)
    slots, updates = _delayed_scaling(state, settings, keys, linears, leaders)
    calls = Calls()
    ops = {
        name: Fp8Linear(
            settings[_device(bsym)],
            slots[name],
            _device(bsym),
            to_torch_dtype(bsym.args[0].dtype),
            calls,
            _weight_cache(
                state,
                bsym.args[1],
                (keys[name], recipes[_device(bsym)], _device(bsym)),
                settings[_device(bsym)],
                slots[name],
            ),
        )
        for name, bsym in linears.items()
    }
    op_of_ctx = {ctx_of(bsym).name: ops[name] for name, bsym in linears.items() if ctx_of(bsym) is not None}
    first_reader = {linears[name].kwargs["quantized_input"].name: name for name in set(leaders.values())}
    recomputes = any(map(is_te_recompute, trace.bound_symbols))
    context = Fp8ForwardContext(calls, updates[True], recomputes=recomputes)
    sync = BackwardSync(calls, updates[False])

    def rebind(bsym: BoundSymbol) -> BoundSymbol:
        if is_te_linear(bsym):
            return bsym.from_bsym(
                sym=bound(bsym.sym, ops[bsym.sym.name]),
                _import_ctx={"transformer_engine": forward_context},
                _object_ctx={"te_fp8_recipe": context},
            )
        if is_te_quantize(bsym):
            return bsym.from_bsym(sym=bound(bsym.sym, ops[first_reader[bsym.output.name]].quantize_input))
        if is_te_recompute(bsym):
            return bsym.from_bsym(sym=bound(bsym.sym, op_of_ctx[bsym.args[3].name].recompute))
        if bsym.sym == te_sync_fp8_meta_bwd:
            return bsym.from_bsym(sym=bound(bsym.sym, sync))
        if bsym.sym == te_differentiable_once:
            return bsym.from_bsym(sym=bound(bsym.sym, differentiable_once))
        return bsym

    return with_bound_symbols(trace, map(rebind, trace.bound_symbols), "Binding of FP8 linears")


def _delayed_scaling(
    state: Fp8State,
    settings: dict[torch.device, Settings],
    keys: dict[str, LinearKey],
    linears: dict[str, BoundSymbol],
    leaders: dict[str, str],
) -> tuple[dict[str, dict[TensorRole, AmaxSlot]], dict[bool, list[ScaleUpdate]]]:
    """Delayed-scaling state: by linear its slots, and by direction (forward?) the scale updates. Empty otherwise."""
    slots: dict[str, dict[TensorRole, AmaxSlot]] = {name: {} for name in linears}
    tensors: list[tuple[str, SlotKey]] = []
    shared: dict[SlotKey, SlotKey] = {}
    for role in TensorRole:
        for name, bsym in linears.items():
            device, recipe = _device(bsym), settings[_device(bsym)].recipe
            if isinstance(recipe, DelayedScaling):
                key = SlotKey(keys[name], role, recipe.amax_history_len, fp8_dtype(recipe, role), device)
                tensors.append((name, key))
                if role is TensorRole.INPUT and name in leaders:
                    shared[key] = key._replace(linear=keys[leaders[name]])
    found, made = state.delayed_scaling_slots((key for _, key in tensors), shared)
    for (name, key), slot in zip(tensors, found):
        slots[name][key.role] = slot
    take_loaded(state, made)
    updates: dict[bool, list[ScaleUpdate]] = {True: [], False: []}
    for kind in dict.fromkeys(key.kind for _, key in tensors):
        updates[kind.forward].append(ScaleUpdate(settings[kind.device], state.groups[kind]))
    return slots, updates


def _leaders(linears: dict[str, BoundSymbol]) -> dict[str, str]:
    """By linear that reads an input that was quantized for several, the first one that reads it."""
    first: dict[str, str] = {}
    readers = {name: b.kwargs["quantized_input"].name for name, b in linears.items() if "quantized_input" in b.kwargs}
    return {name: first.setdefault(quantized, name) for name, quantized in readers.items()}


def _device(bsym: BoundSymbol) -> torch.device:
    return to_torch_device(bsym.args[0].device)


def _weight_cache(
    state: Fp8State,
    weight: TensorProxy,
    key: tuple[LinearKey, int, torch.device],
    settings: Settings,
    slots: dict[TensorRole, AmaxSlot],
) -> WeightCache | None:
    """Where the quantized ``weight`` of the linear, recipe and device of ``key`` is kept; None where it is not.

    A parameter that is frozen is kept, a trained one where ``te_weight_cache=True`` asks for it.
    """
    keep = settings.weight_cache
    if keep is None:
        # With functions of the user's the scale may change in every step, also where the amax does not.
        steady = not isinstance(settings.recipe, DelayedScaling) or not has_functions(settings.recipe)
        keep = steady and not weight.requires_grad and state.names.is_parameter(weight)
    if not keep:
        return None
    if state.optimizer_steps is None:
        state.optimizer_steps = OptimizerSteps()
    if key not in state.weights:
        role = TensorRole.WEIGHT
        transposable = is_transposable(settings.recipe, role)
        transpose = settings.backend.transpose(settings.recipe, role) if transposable else None
        state.weights[key] = WeightCache(state.optimizer_steps, transpose=transpose, slot=slots.get(role))
    if not weight.requires_grad:
        state.weights[key].forget()  # what was written through .data is seen here, if not before
    return state.weights[key]


def linear_keys(trace: TraceCtx) -> dict[str, LinearKey]:
    """By output, who each claimed linear of the forward is beyond this trace: its weight, and which use of it.

    All linears of the forward count, claimed or not: another batch shape may claim others. Their order is the
    program's, so that it is asked for before passes move anything.
    """
    compile_data, compile_stats = compat.current_compilation()
    state = Fp8State.of(compile_data)
    uses: dict[str, int] = {}
    keys = {}
    forward = (b for b in trace.bound_symbols if BoundSymbolTag.BACKWARD not in b.tags)
    linears = (b for b in forward if is_te_linear(b) or is_unclaimed_linear(b))
    for place, bsym in enumerate(linears):
        name = state.names.of(bsym.args[1], trace, compile_stats.last_prologue_traces[-1])
        # A computed weight has no name beyond its trace: its linear's place among all linears stands for it.
        weight = f"computed weight {place}" if name is None else name
        use = uses[weight] = uses.get(weight, -1) + 1
        if is_te_linear(bsym):
            keys[bsym.output[0].name] = LinearKey(weight, use)
    return keys
