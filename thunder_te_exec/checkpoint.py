"""FP8 state in checkpoints: a flat dict of tensors with readable keys, fit for safetensors and ``torch.save``.

A delayed-scaling tensor of the linear ``layers.0.q_proj`` has two entries::

    layers.0.q_proj.input.e4m3_1024.scale           float32 (1,)
    layers.0.q_proj.input.e4m3_1024.amax_history    float32 (1024,)

``input``, ``weight`` or ``grad_output``; FP8 type and history length; the second linear that reads the same weight is
``layers.0.q_proj#1``. One more entry, ``thunder_te_exec.recipes``, uint8, says as JSON under which recipes it was made.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thunder_te_exec import compat
from thunder_te_exec.autocast import active_context
from thunder_te_exec.fp8_weight import Fp8Weight
from thunder_te_exec.recipe import TensorRole, describe
from thunder_te_exec.settings import recipe_in_force
from thunder_te_exec.state import Fp8State, LinearKey, Loaded, SlotKey

__all__ = ["copy_state", "fp8_state_dict", "fp8_state_kept", "load_fp8_state_dict", "take_loaded"]

_RECIPES = "thunder_te_exec.recipes"
_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_PARTS = ("scale", "amax_history")


def fp8_state_dict(jitted: Any) -> dict[str, torch.Tensor]:
    """The FP8 state of ``jitted``, copied; empty of scales before its first call and under current scaling.

    Args:
        jitted: a function or module returned by ``thunder.jit``, or a module returned by ``jit_blocks``.

    Raises:
        TypeError: it came from neither.
    """
    parts = [_state_dict(Fp8State.of(compile_data)) for compile_data in compat.all_compile_data(jitted)]
    recipes: list[dict[str, str]] = []
    for part in parts:
        recipes += [r for r in _decode(part.pop(_RECIPES)) if r not in recipes]
    return {_RECIPES: _encode(recipes)} | {name: tensor for part in parts for name, tensor in part.items()}


def _state_dict(state: Fp8State) -> dict[str, torch.Tensor]:
    state.take_noted()
    recipes = [describe(r) for r in state.recipes]
    waiting: Mapping[str, torch.Tensor] = {}
    if state.loaded is not None:  # for linears that have not run since
        waiting = state.loaded.entries
        saved = _decode(state.loaded.recipes)
        recipes = [*(r for r in saved if r not in recipes), *recipes] if waiting or not recipes else recipes
    found = {_RECIPES: _encode(recipes)} | {name: tensor.detach().clone() for name, tensor in waiting.items()}
    return found | {name: tensor.detach().clone() for name, tensor in _named_tensors(state, state.slots).items()}


def load_fp8_state_dict(jitted: Any, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Load what :func:`fp8_state_dict` gave; before the first call of ``jitted`` too.

    On an error nothing has been changed.

    Args:
        jitted: a function or module returned by ``thunder.jit``, or a module returned by ``jit_blocks``; what was saved
            of the one loads into the other.
        state_dict: the tensors, on any device.
        strict: False takes the entries that fit and ignores others. Before the first call it is not known which linears
            will run in FP8; then an entry that is missing raises in that call.

    Raises:
        TypeError: ``jitted`` came from neither, or ``state_dict`` is no mapping.
        ValueError: saved under another recipe, or entries are missing, unexpected, misshapen or no longer float32; the
            message names them.
    """
    parts = compat.all_compile_data(jitted)
    _check_entries(state_dict)
    for compile_data in parts:
        _check_recipes(Fp8State.of(compile_data), state_dict, compile_data)
    entries = {name: tensor for name, tensor in state_dict.items() if name != _RECIPES}
    entries_of = _entries_of_parts(parts, entries)
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": []}
    for compile_data, own in zip(parts, entries_of):
        state = Fp8State.of(compile_data)
        found = _problems(state, own) if state.slots else _problems_before_first_call(state, own, compile_data.fn)
        for kind, names in zip(problems, found):
            problems[kind] += names
    _raise_if_any(**problems if strict else {**problems, "missing": (), "unexpected": ()})
    for compile_data, own in zip(parts, entries_of):
        state = Fp8State.of(compile_data)
        if not state.slots:
            state.loaded = Loaded(own, strict, state_dict[_RECIPES].detach().clone())
            continue
        _copy(state, own, _named_tensors(state, state.slots))
        for weight in state.weights.values():  # quantized with other scales
            weight.forget()


def _entries_of_parts(parts: Sequence[Any], entries: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """``entries`` by the part whose linears they are of; those that no part knows are the first one's."""
    if len(parts) == 1:
        return [dict(entries)]
    states = [Fp8State.of(compile_data) for compile_data in parts]
    part_of = {name: i for i, cd in enumerate(parts) for name in _linears(states[i], cd.fn)}
    part_of.update({name: i for i, s in enumerate(states) for name in map(functools.partial(_linear, s), s.slots)})
    own: list[dict[str, torch.Tensor]] = [{} for _ in parts]
    for name, tensor in entries.items():
        own[part_of.get(_linear_of_entry(name), 0)][name] = tensor
    return own


def _linears(state: Fp8State, fn: torch.nn.Module) -> set[str]:
    """What linears of the module ``fn`` there may be, by the names that their entries begin with."""
    return {state.full_name(n).removesuffix(".weight") for n, _ in fn.named_parameters(remove_duplicate=False)}


def _linear_of_entry(name: str) -> str:
    return name.rsplit(".", 3)[0].partition("#")[0]


def _problems(state: Fp8State, entries: Mapping[str, torch.Tensor]) -> tuple[set[str], set[str], list[str]]:
    """What does not fit the state of a function that has been called: missing, unexpected, misshapen."""
    targets = _named_tensors(state, state.slots)
    misshapen = [
        f"{name} {tuple(entries[name].shape)}, expected {tuple(target.shape)}"
        for name, target in targets.items()
        if name in entries and entries[name].shape != target.shape
    ]
    return targets.keys() - entries.keys(), entries.keys() - targets.keys(), misshapen


def copy_state(of: Any, to: Any) -> None:
    """Give the function of CompileData ``to``, which has not been called yet, a copy of the FP8 state of ``of``."""
    state = Fp8State.of(of)
    entries = _state_dict(state)
    strict = state.loaded is not None and state.loaded.strict
    Fp8State.of(to).loaded = Loaded(entries, strict=strict, recipes=entries.pop(_RECIPES))


@contextmanager
def fp8_state_kept(jitted: Any) -> Iterator[None]:
    """Calls of ``jitted`` inside move no scale: afterwards each is what it was, or what a first call begins with.

    But for the scales of frozen weights that are quantized once: these are the ones that they were quantized with.
    """
    before = []
    for compile_data in compat.all_compile_data(jitted):
        state = Fp8State.of(compile_data)
        before.append((compile_data, _state_dict(state), set(state.slots), state.loaded))
    try:
        yield
    finally:
        for compile_data, entries, keys, loaded in before:
            _restore(compile_data, entries, keys, loaded)


def _restore(compile_data: Any, entries: dict[str, torch.Tensor], keys: set[SlotKey], loaded: Loaded | None) -> None:
    """Give the function the state ``entries`` of the slots ``keys``; to others what they began with."""
    state = Fp8State.of(compile_data)
    once = _quantized_once(state, compat.jitted_module(compile_data))

    def is_settled(key: SlotKey) -> bool:
        """Whether a weight was quantized inside for good, with a scale that it did not have before."""
        name, scale = f"{_name(state, key)}.scale", state.slots[key].scale
        return key.linear in once and not (key in keys and torch.equal(entries[name], scale))

    moved = [key for key in state.slots if key.role is not TensorRole.WEIGHT or not is_settled(key)]
    new = [key for key in moved if key not in keys]
    for key in new:
        state.slots[key].scale.fill_(1.0)
        state.slots[key].history.zero_()
    _copy(state, entries, _named_tensors(state, (key for key in moved if key in keys)))
    for weight in state.weights.values():
        if not weight.frozen:
            weight.forget()  # quantized with a scale that has been taken back
    if loaded is not None and state.slots.keys() - keys:
        _copy(state, loaded.entries, _named_tensors(state, new))
        known = _named_tensors(state, state.slots)
        rest = {name: tensor for name, tensor in loaded.entries.items() if name not in known}
        loaded = loaded._replace(entries=rest, strict=False)
    state.loaded = loaded


def _quantized_once(state: Fp8State, module: torch.nn.Module | None) -> set[LinearKey]:
    """The linears whose weights are quantized once, or held in FP8."""
    named = () if module is None else module.named_parameters(remove_duplicate=False)
    held = {name for name, p in named if isinstance(p, Fp8Weight)}
    kept = {linear for (linear, *_), weight in state.weights.items() if weight.frozen}
    return kept | {key.linear for key in state.slots if key.linear.weight in held}


def take_loaded(state: Fp8State, new: list[SlotKey]) -> None:
    """Fill slots that a compilation has just made from what was loaded before.

    Raises:
        ValueError: loaded with ``strict``, and an entry for a slot of the first compilation is not there.
    """
    if state.loaded is None:
        return
    entries, strict, _ = state.loaded
    targets = _named_tensors(state, new)
    missing = targets.keys() - entries.keys()
    if strict and missing:
        state.forget(new)
        _raise_if_any(missing, (), ())
    _copy(state, entries, targets)
    # A later compilation may meet other linears, of which nothing was promised.
    rest = {name: tensor for name, tensor in entries.items() if name not in targets}
    state.loaded = state.loaded._replace(entries=rest, strict=False)


def _linear(state: Fp8State, key: SlotKey) -> str:
    return state.full_name(key.linear.weight).removesuffix(".weight")


def _name(state: Fp8State, key: SlotKey) -> str:
    linear = _linear(state, key) + (f"#{key.linear.use}" if key.linear.use else "")
    return f"{linear}.{key.role.name.lower()}.{_DTYPES[key.dtype]}_{key.length}"


def _named_tensors(state: Fp8State, keys: Iterable[SlotKey]) -> dict[str, torch.Tensor]:
    """The state of the tensors of ``keys``, views, by the names of their entries."""
    slots = ((key, state.slots[key]) for key in keys)
    return {
        f"{_name(state, key)}.{part}": t for key, slot in slots for part, t in zip(_PARTS, (slot.scale, slot.history))
    }


@torch.no_grad()
def _copy(state: Fp8State, entries: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    state.take_noted()  # a call that an exception ended does not count any more
    for name, target in targets.items():
        if name in entries:
            target.copy_(entries[name])
    state.scales_changed()


def _encode(recipes: list[dict[str, str]]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(recipes).encode()), dtype=torch.uint8)


def _decode(recipes: torch.Tensor) -> list[dict[str, str]]:
    return json.loads(bytes(recipes.tolist()))


def _check_entries(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected what fp8_state_dict gave, tensors by name, got {type(state_dict).__name__}")
    scales = {name: t for name, t in state_dict.items() if str(name).rpartition(".")[2] in _PARTS}
    cast = {name: getattr(t, "dtype", type(t).__name__) for name, t in scales.items()}
    wrong = [f"{name} {dtype}" for name, dtype in sorted(cast.items()) if dtype is not torch.float32]
    if wrong:
        raise ValueError(
            f"FP8 state is torch.float32, nothing was loaded; got {', '.join(wrong)}: keep it apart from a model "
            f"that is cast, or save it anew"
        )


def _check_recipes(state: Fp8State, state_dict: Mapping[str, torch.Tensor], compile_data: Any) -> None:
    if _RECIPES not in state_dict:
        raise ValueError(f"expected the entry {_RECIPES!r}: not a state dict of fp8_state_dict")
    saved = _decode(state_dict[_RECIPES])
    option = compile_data.compile_options.get("te_fp8_recipe")
    in_force = recipe_in_force(active_context(), option, _device(compile_data.fn))
    ours = [describe(recipe) for recipe in (*state.recipes, in_force)]
    if saved and not any(recipe in ours for recipe in saved):
        raise ValueError(
            f"FP8 state was saved under {_show(saved)} and is loaded under {_show(ours)}: "
            f"load it under the recipe that it was made with, or start without FP8 state"
        )


def _show(recipes: list[dict[str, str]]) -> str:
    return ", ".join(f"{r['recipe']}({', '.join(f'{k}={v}' for k, v in r.items() if k != 'recipe')})" for r in recipes)


def _device(fn: Any) -> torch.device:
    tensor = next(fn.parameters(), None) if isinstance(fn, torch.nn.Module) else None
    return torch.device("cpu") if tensor is None else tensor.device


def _problems_before_first_call(
    state: Fp8State, entries: Mapping[str, torch.Tensor], fn: Any
) -> tuple[list[str], list[str], list[str]]:
    """What shows before the first call of ``fn``: missing, unexpected, misshapen."""
    names = _linears(state, fn) if isinstance(fn, torch.nn.Module) else None
    missing, unexpected, misshapen = [], [], []
    for name, tensor in entries.items():
        rest, _, part = name.rpartition(".")
        length = rest.rpartition("_")[2]
        if part not in _PARTS or not length.isdigit() or (names is not None and _linear_of_entry(name) not in names):
            unexpected.append(name)
        elif tuple(tensor.shape) != ((1,) if part == "scale" else (int(length),)):
            misshapen.append(f"{name} {tuple(tensor.shape)}")
        else:
            missing += [f"{rest}.{other}" for other in _PARTS if f"{rest}.{other}" not in entries]
    return missing, unexpected, misshapen


def _raise_if_any(missing: Any, unexpected: Any, misshapen: Any) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    found = [f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names]
    if found:
        raise ValueError(f"FP8 state does not fit, nothing was loaded; {'; '.join(found)}")
