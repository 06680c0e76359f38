"""Binding: gives every numbered linear of a trace, and the scale updates, what they run.

The last step of compiling, and the only one that knows state and backends. It rewrites nothing: it sets what symbols
call. Whatever a call would have to look up (recipe, scales, quantizers, GEMM options) is looked up here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder_te_exec import compat

from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx

from thunder_te_exec import forward_context
from thunder_te_exec.cache import EntriesByContext
from thunder_te_exec.calls import Calls
from thunder_te_exec.checkpoint import take_loaded
from thunder_te_exec.layouts import is_transposable
from thunder_te_exec.linear import Fp8Linear, grad_scale
from thunder_te_exec.passes.rewrite import with_bound_symbols
from thunder_te_exec.recipe import DelayedScaling, TensorRole, fp8_dtype, has_functions
from thunder_te_exec.scale_updates import BackwardSync, Fp8ForwardContext, ScaleUpdate, differentiable_once
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import AmaxSlot, Fp8State, LinearKey, SlotKey
from thunder_te_exec.symbols import (
    ctx_of,
    is_te_input_scale,
    is_te_linear,
    is_te_quantize,
    is_te_recompute,
    is_unclaimed_linear,
    te_delay_wgrad,
    te_differentiable_once,
    te_grad_scale,
    te_sync_fp8_meta_bwd,
)
from thunder_te_exec.weight_cache import OptimizerSteps, WeightCache
from thunder_te_exec.wgrad_queue import WgradProgram

__all__ = ["Plan", "bind", "bound", "linear_keys"]


class PlannedLinear(NamedTuple):
    """What a linear of a trace is bound by: who it is, and what its operands are."""

    key: LinearKey
    device: torch.device
    dtype: torch.dtype
    frozen: bool
    is_parameter: bool
    quantized_input: str | None


class Plan(NamedTuple):
    """What binding needs to know of a trace, by the names of its symbols.

    ``quantizes`` has by ``te_quantize_input_N`` the name of its output, ``scales`` by ``te_input_scale_N`` the name of
    the output of the ``te_quantize_input`` that it is for, ``recomputes`` by ``te_recompute_linear_N`` its linear's.
    ``wgrads`` are the programs whose operands ``te_delay_wgrad`` is called with.
    """

    linears: dict[str, PlannedLinear]
    quantizes: dict[str, str]
    scales: dict[str, str]
    recomputes: dict[str, str]
    wgrads: tuple[WgradProgram, ...] = ()


#: The name of the context that a forward runs in (``thunder_te_exec.forward_context``).
_CONTEXT = "te_fp8_recipe"


def bind(
    trace: TraceCtx,
    keys_of_outputs: dict[str, LinearKey],
    run_by: Callable[[Symbol, Callable[..., Any]], Symbol],
    wgrads: tuple[WgradProgram, ...] = (),
) -> TraceCtx:
    """Bind the linears and scale updates of ``trace``.

    Args:
        trace: after all passes.
        keys_of_outputs: what :func:`linear_keys` found before them.
        run_by: ``run_by(symbol, fn)`` gives the symbol that runs ``fn``.
        wgrads: the programs of the gradients that wait.
    """
    compile_data, compile_stats = compat.current_compilation()
    plan = _plan(trace, keys_of_outputs, Fp8State.of(compile_data))._replace(wgrads=wgrads)
    EntriesByContext.of(compile_data, compile_stats).planned(compile_stats.last_traces, plan)
    objects = bound(plan)

    def rebind(bsym: BoundSymbol) -> BoundSymbol:
        if is_te_linear(bsym):
            return bsym.from_bsym(
                sym=run_by(bsym.sym, objects[bsym.sym.name]),
                _import_ctx={"transformer_engine": forward_context},
                _object_ctx={_CONTEXT: objects[_CONTEXT]},
            )
        if bsym.sym == te_grad_scale:
            return bsym.from_bsym(sym=run_by(bsym.sym, grad_scale))
        others = te_sync_fp8_meta_bwd, te_differentiable_once, te_delay_wgrad
        named = is_te_quantize(bsym) or is_te_input_scale(bsym) or is_te_recompute(bsym)
        if named or bsym.sym in others:
            return bsym.from_bsym(sym=run_by(bsym.sym, objects[bsym.sym.name]))
        return bsym

    return with_bound_symbols(trace, map(rebind, trace.bound_symbols), "Binding of FP8 linears")


def _plan(trace: TraceCtx, keys_of_outputs: dict[str, LinearKey], state: Fp8State) -> Plan:
    linears = {b.sym.name: b for b in trace.bound_symbols if is_te_linear(b)}
    name_of_ctx = {ctx_of(bsym).name: name for name, bsym in linears.items() if ctx_of(bsym) is not None}

    def planned(bsym: BoundSymbol) -> PlannedLinear:
        a, weight, *_ = bsym.args
        quantized = bsym.kwargs.get("quantized_input")
        return PlannedLinear(
            keys_of_outputs[bsym.output[0].name],
            to_torch_device(a.device),
            to_torch_dtype(bsym.output[0].dtype),  # its input may have been quantized
            not weight.requires_grad,
            state.names.is_parameter(weight),
            None if quantized is None else quantized.name,
        )

    scale_of = {b.output.name: b.sym.name for b in trace.bound_symbols if is_te_input_scale(b)}
    fused = (b for b in trace.bound_symbols if is_te_quantize(b) and "scale" in b.kwargs)
    return Plan(
        {name: planned(bsym) for name, bsym in linears.items()},
        {b.sym.name: b.output.name for b in trace.bound_symbols if is_te_quantize(b)},
        {scale_of[b.kwargs["scale"].name]: b.output.name for b in fused},
        {b.sym.name: name_of_ctx[b.args[3].name] for b in trace.bound_symbols if is_te_recompute(b)},
    )


def bound(plan: Plan) -> dict[str, Any]:
    """What symbols of a trace of ``plan`` run, and its context, by their names, in the function that is compiled."""
    compile_data, _ = compat.current_compilation()
    state = Fp8State.of(compile_data)
    devices = dict.fromkeys(linear.device for linear in plan.linears.values())
    settings = {device: Settings.current(compile_data, device) for device in devices}
    recipes = {device: state.index_of_recipe(chosen.recipe) for device, chosen in settings.items()}
    for device in devices:
        if device.type == "cuda":
            compat.prepare_autograd_thread(device)
    first_reader: dict[str | None, str] = {}
    for name, linear in plan.linears.items():
        first_reader.setdefault(linear.quantized_input, name)
    slots, updates = _delayed_scaling(state, settings, plan.linears, first_reader)
    calls = Calls()
    ops, on_cuda = {}, []
    for name, linear in plan.linears.items():
        chosen = settings[linear.device]
        weights = _weight_cache(state, linear, recipes[linear.device], chosen, slots[name])
        ops[name] = Fp8Linear(chosen, slots[name], linear.device, linear.dtype, calls, weights)
        if weights is not None and linear.device.type == "cuda":
            on_cuda.append(weights)
    context = Fp8ForwardContext(
        calls,
        updates[True],
        recipes=tuple(recipes.values()),
        recomputes=bool(plan.recomputes),
        checkpointed=state.checkpointed,
        weights=on_cuda,
        backward_updates=updates[False] if any(device.type == "cuda" for device in devices) else None,
    )
    return {
        **ops,
        **{name: ops[first_reader[output]].quantize_input for name, output in plan.quantizes.items()},
        **{name: ops[first_reader[output]].input_scale for name, output in plan.scales.items()},
        **{name: ops[linear].recompute for name, linear in plan.recomputes.items()},
        te_sync_fp8_meta_bwd.name: BackwardSync(calls, updates[False]),
        te_differentiable_once.name: differentiable_once,
        te_delay_wgrad.name: state.wgrads.of(compat.jitted_module(compile_data), plan.wgrads, state.full_name),
        _CONTEXT: context,
    }


def _delayed_scaling(
    state: Fp8State,
    settings: dict[torch.device, Settings],
    linears: dict[str, PlannedLinear],
    first_reader: dict[str | None, str],
) -> tuple[dict[str, dict[TensorRole, AmaxSlot]], dict[bool, list[ScaleUpdate]]]:
    """Delayed-scaling state: by linear its slots, and by direction (forward?) the scale updates. Empty otherwise."""
    slots: dict[str, dict[TensorRole, AmaxSlot]] = {name: {} for name in linears}
    tensors: list[tuple[str, SlotKey]] = []
    shared: dict[SlotKey, SlotKey] = {}
    for role in TensorRole:
        for name, linear in linears.items():
            recipe = settings[linear.device].recipe
            if isinstance(recipe, DelayedScaling):
                key = SlotKey(linear.key, role, recipe.amax_history_len, fp8_dtype(recipe, role), linear.device)
                tensors.append((name, key))
                if role is TensorRole.INPUT and linear.quantized_input is not None:
                    shared[key] = key._replace(linear=linears[first_reader[linear.quantized_input]].key)
    found, made = state.delayed_scaling_slots((key for _, key in tensors), shared)
    for (name, key), slot in zip(tensors, found):
        slots[name][key.role] = slot
    take_loaded(state, made)
    updates: dict[bool, list[ScaleUpdate]] = {True: [], False: []}
    for kind in dict.fromkeys(key.kind for _, key in tensors):
        updates[kind.forward].append(ScaleUpdate(settings[kind.device], state.groups[kind]))
    return slots, updates


def _weight_cache(
    state: Fp8State, linear: PlannedLinear, recipe: int, settings: Settings, slots: dict[TensorRole, AmaxSlot]
) -> WeightCache | None:
    """Where the quantized weight of ``linear`` under the ``recipe``-th recipe is kept; None where it is not.

    A parameter that is frozen is kept, a trained one where ``te_weight_cache=True`` asks for it.
    """
    keep = settings.weight_cache
    if keep is None:
        # With functions of the user's the scale may change in every step, also where the amax does not.
        steady = not isinstance(settings.recipe, DelayedScaling) or not has_functions(settings.recipe)
        keep = steady and linear.frozen and linear.is_parameter
    if not keep:
        return None
    if state.optimizer_steps is None:
        state.optimizer_steps = OptimizerSteps()
    key = linear.key, recipe, linear.device
    if key not in state.weights:
        role = TensorRole.WEIGHT
        transposable = is_transposable(settings.recipe, role)
        transpose = settings.backend.transpose(settings.recipe, role) if transposable else None
        state.weights[key] = WeightCache(state.optimizer_steps, transpose=transpose, slot=slots.get(role))
    state.weights[key].frozen = linear.frozen
    if linear.frozen:
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
