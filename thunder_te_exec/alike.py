"""When two modules are alike: thunder traces them to one program, over parameters and buffers of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["HOOKS", "description_of", "first_difference"]

#: What ``nn.Module.__call__`` looks at for hooks.
HOOKS = frozenset(
    f"_{hooks}{more}"
    for hooks in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    for more in ("", "_with_kwargs", "_always_called")
)

#: Hooks that no run of a module calls.
_OF_STATE_DICT = frozenset(
    ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
)

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.device)
_TENSORS = ("_parameters", "_buffers")


class _Same:
    """An object that only itself is equal to; kept, so that no other one gets its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} object"


class _Tensor(NamedTuple):
    """A parameter or buffer: which of both, the first name that it has, and what it is."""

    kind: str
    first_name: str
    cls: type
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, t: torch.Tensor, kind: str, first_name: str) -> _Tensor:
        stride = t.stride() if t.layout is torch.strided else None
        return cls(kind, first_name, type(t), tuple(t.shape), stride, t.dtype, t.device, t.requires_grad)

    def words(self) -> Iterator[str]:
        """What it is, a phrase for each field."""
        yield f"in {self.kind}"
        yield f"one tensor with {self.first_name}"
        yield f"a {self.cls.__name__}"
        yield f"of shape {self.shape}"
        yield f"of strides {self.stride}"
        yield str(self.dtype)
        yield f"on {self.device}"
        yield "trained" if self.requires_grad else "frozen"


def description_of(module: nn.Module, fqn: str, ignore: Collection[str] = ()) -> dict[str, Any]:
    """What tracing ``module``, ``fqn`` of its model, may depend on, by name: equal descriptions, equal traces.

    Classes and paths of all submodules; of parameters and buffers type, shape, strides, dtype, device, requires_grad
    and which are one tensor; every other attribute, hooks included. Numbers, strings, and containers of such are equal
    by value, but for strings that begin with the module's own name, such as those in which peft keeps the names of its
    targets, and which the prologue checks where they were read; functions are equal by their code and what they close
    over. All other objects, plain tensors among them, are equal only to themselves, with their attributes as they are
    now. thunder's prologue checks part of this alone, and not None, enums, functions, a sum of a list, or what is in a
    set; of a module whose forward it reads it checks all numbers and strings, so that an index of a block that nobody
    uses keeps blocks apart there too. Attributes that are named in ``ignore`` are left out.
    """
    own = _own_names(fqn)
    found: dict[str, Any] = {}
    names: dict[int, str] = {}
    for path, sub in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        # Hooks are under keys that no two have in common.
        keys = sorted({key for hooks in HOOKS & vars(sub).keys() for key in vars(sub)[hooks]})
        places = {key: place for place, key in enumerate(keys)}
        found[f"class of {path or 'itself'}"] = _Same(type(sub)), names.setdefault(id(sub), path)
        for name, value in vars(sub).items():
            if name in _TENSORS:
                for key, tensor in value.items():
                    own_name = f"{dot}{key}"
                    found[own_name] = name
                    if isinstance(tensor, torch.Tensor):
                        found[own_name] = _Tensor.of(tensor, name, names.setdefault(id(tensor), own_name))
            elif name == "_modules":
                found[f"{dot}{name}"] = tuple((key, child is None) for key, child in value.items())
            elif name in HOOKS:
                found[f"{dot}{name}"] = tuple((places[key], _value(hook, own)) for key, hook in value.items())
            elif name not in ignore and name not in _OF_STATE_DICT:
                found[f"{dot}{name}"] = _value(value, own)
    return found


def _own_names(fqn: str) -> tuple[str, ...]:
    """``fqn``, and what is left of it in a part of the model, as far as it tells blocks apart: ``layers.3``."""
    parts = fqn.split(".")
    return tuple(".".join(parts[i:]) for i in range(len(parts) - 1))


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    """In words, the first thing in which description ``a`` is not ``b``; "" where they are equal."""
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            return f"{name} is {'not ' if name not in a else ''}there"
        if isinstance(a[name], _Tensor) and isinstance(b[name], _Tensor) and a[name] != b[name]:
            differing = [words for words in zip(a[name].words(), b[name].words()) if words[0] != words[1]]
            return "; ".join(f"{name} is {mine}, not {its}" for mine, its in differing)
        if a[name] != b[name]:
            return f"{name} is {_shown(a[name])}, not {_shown(b[name])}"
    return ""


def _value(value: Any, own: tuple[str, ...], inside: tuple[int, ...] = ()) -> Any:
    if type(value) is str:
        prefix = next((p for p in own if value == p or value.startswith(f"{p}.")), "")
        return str, bool(prefix), value[len(prefix) :]
    if type(value) in _SCALARS:
        return type(value), repr(value)
    if id(value) in inside or isinstance(value, (type, torch.Tensor, nn.Module)):
        return _Same(value)
    inside = (*inside, id(value))
    if type(value) is FunctionType and not vars(value):
        # A lambda or an inner function, of which every instance of a class may have its own.
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        bound_to = (value.__defaults__, value.__kwdefaults__, cells)
        return _Same(value.__code__), _Same(value.__globals__), tuple(_value(v, own, inside) for v in bound_to)
    if type(value) in (set, frozenset):  # what is in one no prologue checks
        return type(value), frozenset(repr(_value(v, (), inside)) for v in value)
    if type(value) in (tuple, list, torch.Size):
        return type(value), tuple(_value(v, own, inside) for v in value)
    if type(value) in (dict, OrderedDict):
        return type(value), tuple((_value(k, own, inside), _value(v, own, inside)) for k, v in value.items())
    attributes = vars(value) if len(inside) == 1 and hasattr(value, "__dict__") and not callable(value) else {}
    return _Same(value), tuple((name, _value(v, own, inside)) for name, v in attributes.items())


def _shown(value: Any) -> str:
    shown = str(value)
    if type(value) is tuple and value and isinstance(value[0], type):
        shown = repr(value[2]) if value[0] is str else str(value[1])
    if isinstance(value, _Tensor):
        shown = ", ".join(value.words())
    return shown if len(shown) < 200 else f"{shown[:200]}..."
