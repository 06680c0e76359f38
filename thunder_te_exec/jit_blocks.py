"""``jit_blocks``: a model whose repeated blocks are traced once.

Every block is a jitted function of its own, with its own FP8 state. Where one would be compiled, and one that is alike
has been compiled for the same inputs, mode and FP8 context, that one's final traces are taken: their functions are made
anew, reading this block and bound to this block's state.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from thunder_te_exec import compat

import thunder
from thunder_te_exec.alike import HOOKS, description_of, first_difference
from thunder_te_exec.binding import bound
from thunder_te_exec.cache import Compiled, EntriesByContext
from thunder_te_exec.state import Fp8State
from thunder_te_exec.weight_cache import OptimizerSteps
from thunder_te_exec.wgrad_queue import WgradQueue

__all__ = ["jit_blocks"]


def jit_blocks(model: nn.Module, *, ignore: Collection[str] = (), **options: Any) -> nn.Module:
    """``model`` with what its ``nn.ModuleList``s repeat compiled once, and the numbers of ``thunder.jit(model)``.

    An ``nn.ModuleList`` holds blocks where two of its elements are of one class. Each block is compiled by itself, and
    so is each largest submodule that has no blocks (embedding, final norm, head). Those that are alike are traced once:
    they have the same classes, shapes, strides, dtypes, devices and ``requires_grad`` of parameters and buffers, other
    attributes, hooks inside, and answers of ``te_filter``. What the modules that hold blocks do in their own
    ``forward`` runs eagerly. A model without blocks is compiled as one.

    Args:
        model: stays usable as it is; parameters, buffers and submodules below the blocks are shared with it.
        ignore: names of attributes that differ from block to block and that no block's result depends on, such as
            "block_idx" of LitGPT's; what was traced with one of their values serves all blocks.
        options: those of ``thunder.jit``: ``executors=[te_ex]``, ``te_fp8_recipe=``, ...

    Returns:
        A module of the same class and structure, with the same parameters under the same names. ``claims``,
        ``fp8_state_dict`` and ``load_fp8_state_dict`` take it as what ``thunder.jit`` returns, with names of the model.

    Raises:
        TypeError: ``model`` is no module, or is jitted; ``ignore`` is a string.
        NotImplementedError: ``transforms`` are given.
        ValueError: no module has an attribute that is to be ignored; two parts that are compiled by themselves share a
            parameter; a module cannot be compiled by itself because its instance, or its class, changes how it is
            called.
    """
    if not isinstance(model, nn.Module) or compat.has_jitted(model):
        raise TypeError(f"jit_blocks: expected a torch module that is not jitted, got {type(model).__name__}")
    if options.get("transforms"):
        raise NotImplementedError("jit_blocks takes no transforms: they keep parameters of their own; jit the model")
    _check_ignored(model, ignore)
    parts: dict[str, nn.Module] = {}
    jitted = _Copy(_Family(options, frozenset(ignore), _places(model)), parts, {}).of(model, "", False)
    _check_nothing_shared(parts)
    return jitted


def _places(model: nn.Module) -> Counter[int]:
    """How often each parameter stands in ``model``, by identity."""
    return Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))


def _check_ignored(model: nn.Module, ignore: Collection[str]) -> None:
    if isinstance(ignore, str):
        raise TypeError(f"jit_blocks: ignore={ignore!r}: expected a list of names of attributes, such as [{ignore!r}]")
    unknown = sorted(set(ignore) - {name for module in model.modules() for name in vars(module)})
    if unknown:
        raise ValueError(f"jit_blocks: ignore: no module of the model has an attribute {unknown[0]!r}")


def _holds_blocks(module: nn.Module) -> bool:
    classes = [type(child) for child in module] if isinstance(module, nn.ModuleList) else []
    return len(set(classes)) < len(classes)


class _Copy(NamedTuple):
    """Copies a model down to what is compiled, which gets another ``forward``.

    ``parts`` gets what is compiled, by name; ``copies`` what has been copied, by identity.
    """

    family: _Family
    parts: dict[str, nn.Module]
    copies: dict[int, nn.Module]

    def of(self, module: nn.Module, name: str, is_block: bool) -> nn.Module:
        is_container = type(module).forward is nn.Module.forward
        is_part = not is_container and (is_block or not any(map(_holds_blocks, module.modules())))
        if is_part:
            self.parts[name] = module
        if id(module) in self.copies:
            return self.copies[id(module)]
        _check_calls_forward(module, name)
        copy = self.copies[id(module)] = _shallow_copy(module)
        if is_part:
            vars(copy)["forward"] = _Part(copy, name, self.family)
            return copy
        is_block = (is_block and is_container) or _holds_blocks(module)
        vars(copy)["_modules"] = {
            key: None if child is None else self.of(child, f"{name}.{key}" if name else key, is_block)
            for key, child in module._modules.items()
        }
        return copy


def _shallow_copy(module: nn.Module) -> nn.Module:
    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    return copy


def _check_calls_forward(module: nn.Module, name: str) -> None:
    own = [key for key in ("forward", "__call__", "_call_impl", "_compiled_call_impl") if vars(module).get(key)]
    if own or type(module).__call__ is not nn.Module.__call__:
        raise ValueError(
            f"jit_blocks: {name or type(module).__name__!r} has a {(own or ['__call__'])[0]} of its own, which would "
            f"be left out or applied twice: take it away before jit_blocks, or jit the whole model with thunder.jit"
        )


def _check_nothing_shared(parts: dict[str, nn.Module]) -> None:
    first: dict[int, tuple[str, str]] = {}
    for part, module in parts.items():
        if isinstance(module, nn.Embedding):  # has no linear that would share FP8 state
            continue
        for name, parameter in module.named_parameters(prefix=part):
            other = first.setdefault(id(parameter), (part, name))
            if other[0] != part:
                raise ValueError(
                    f"jit_blocks: {other[1]} and {name} are one parameter of two blocks that are compiled by "
                    f"themselves: their linears would not share FP8 state as they do in thunder.jit; use that"
                )


class _LiveTensors(MutableMapping):
    """Parameters or buffers of a module by name, as they are now: ThunderModule keeps those that it was made with."""

    def __init__(self, module: nn.Module, kind: str) -> None:
        self._module, self._kind = module, kind
        self._owners = {
            f"{path}.{key}" if path else key: (vars(sub)[kind], key)
            for path, sub in module.named_modules(remove_duplicate=False)
            for key, tensor in vars(sub)[kind].items()
            if tensor is not None
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors, key = self._owners[name]
        return tensors[key]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._owners:  # a buffer that was None, which the program makes in its first run
            path, _, key = name.rpartition(".")
            self._owners[name] = vars(self._module.get_submodule(path))[self._kind], key
        tensors, key = self._owners[name]
        tensors[key] = tensor

    def __delitem__(self, name: str) -> None:
        del self._owners[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


class _Part:
    """The ``forward`` of a module that is compiled by itself; has what functions of ``thunder.jit`` have."""

    def __init__(self, module: nn.Module, name: str, family: _Family) -> None:
        self._module = weakref.ref(module)  # which has this object
        self._name = name
        # What is traced: the module without its hooks, which run around this forward, and without this forward.
        self._traced = _shallow_copy(module)
        vars(self._traced).update({hooks: type(vars(module)[hooks])() for hooks in HOOKS & vars(module).keys()})
        self._jitted = thunder.jit(self._traced, **family.options)
        self._jitted._overrides_parameters = _LiveTensors(self._traced, "_parameters")
        self._jitted._overrides_buffers = _LiveTensors(self._traced, "_buffers")
        self._lc_cd, self._lc_cs = self._jitted._lc_cd, self._jitted._lc_cs
        offers = _Offers(name, self._traced, weakref.ref(self._lc_cd), weakref.ref(self._lc_cs), family)
        self._lc_cs.interpreter_cache = EntriesByContext([], family.options.get("te_fp8_recipe"), offers)
        state = Fp8State.of(self._lc_cd)
        state.full_name, state.warned = _full_names(name), family.warned
        state.optimizer_steps, state.wgrads = family.optimizer_steps, family.wgrads
        here = _places(module)
        state.is_used_elsewhere = lambda p: family.places[id(p)] > here[id(p)]
        self._checkpointed = state.checkpointed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        under_way = None if torch.is_grad_enabled() else compat.checkpoint_under_way()
        if under_way is None or not under_way.reentrant:
            return self._jitted(*args, **kwargs)
        # The first run of a reentrant checkpoint. Its second one has the bits of a run with gradients.
        with torch.enable_grad(), self._checkpointed.inside(under_way):
            out = self._jitted(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, out)

    def _follow(self) -> None:
        """Let what is traced have the attributes that the module has now."""
        now, traced = vars(self._module()), vars(self._traced)
        traced.update({key: value for key, value in now.items() if key != "forward" and key not in HOOKS})
        for key in traced.keys() - now.keys():
            del traced[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "what jit_blocks returns is neither copied nor pickled: copy the model that it was given and call "
            "jit_blocks on the copy; state_dict() and fp8_state_dict() save what it has"
        )


class _Family:
    """What the parts of one model have in common: options, and what any of them has been compiled to.

    ``places`` are those of the model's parameters; ``before`` has the descriptions of parts that are about to be
    compiled: tracing may change a module.
    """

    def __init__(self, options: dict[str, Any], ignore: frozenset[str], places: Counter[int]) -> None:
        self.options, self.ignore, self.places = options, ignore, places
        self.warned: set[str] = set()
        self.optimizer_steps = OptimizerSteps()
        self.wgrads = WgradQueue()
        self.compiled: list[_Offer] = []
        self.before: dict[str, dict[str, Any]] = {}


def _full_names(part: str) -> Callable[[str], str]:
    """From a weight's name in ``part`` to its name in the model."""
    return f"{part}.{{}}".format if part else str


class _Offer(NamedTuple):
    """An entry that was compiled for the part ``name``, and what that was."""

    name: str
    module_class: type
    description: dict[str, Any]
    programs: compat.EntryPrograms
    compiled: Compiled


class _Offers(NamedTuple):
    """What ``EntriesByContext`` asks for entries of other parts."""

    name: str
    traced: nn.Module
    compile_data: Callable[[], Any]
    compile_stats: Callable[[], Any]
    family: _Family

    def add(self, entry: Any, compiled: Compiled) -> None:
        """``entry`` was compiled for this part."""
        description = self.family.before.pop(self.name, None) or description_of(
            self.traced, self.name, self.family.ignore
        )
        others = [o for o in self.family.compiled if o.module_class is type(self.traced) and o.name != self.name]
        differences = [first_difference(description, o.description) for o in others]
        if all(differences) and differences:
            compat.warn(
                f"jit_blocks: {self.name} is compiled by itself, for it differs from {others[-1].name}: "
                f"{differences[-1]} (an attribute that no block needs can be named in ignore=)"
            )
        self.family.compiled.append(
            _Offer(self.name, type(self.traced), description, compat.EntryPrograms(entry, self.family.ignore), compiled)
        )

    def offered(self, fits: Callable[[Compiled], bool]) -> Iterator[Any]:
        """Entries of other parts that are like this one, made this one's own, where they fit what it is called with."""
        description = self.family.before[self.name] = description_of(self.traced, self.name, self.family.ignore)
        others = [o for o in reversed(self.family.compiled) if o.name != self.name and fits(o.compiled)]
        others = [o for o in others if o.description == description and self._is_filtered_like(o)]
        called_with: list[Any] = []

        def probe(*args: Any, **kwargs: Any) -> None:
            called_with[:] = args, kwargs
            raise LookupError("no entry")

        if others:
            yield others[0].programs.entry._replace(prologue_fn=probe)
        for other in others:
            entry = self._made_own(other, *called_with)
            if entry is not None:
                yield entry
                return

    def _is_filtered_like(self, other: _Offer) -> bool:
        wanted = self.family.options.get("te_filter")
        mine, its = (_full_names(name) for name in (self.name, other.name))
        return wanted is None or all(
            bool(wanted(mine(c.weight), c.weight_shape)) == bool(wanted(its(c.weight), c.weight_shape))
            for c in other.compiled.claims.values()
        )

    def _made_own(self, other: _Offer, args: Any, kwargs: Any) -> Any:
        """The entry of ``other`` for this part; None where it is for other inputs or another mode."""
        compile_data, compile_stats = self.compile_data(), self.compile_stats()
        prologue = other.programs.prologue_of(self.traced)
        with compat.compiling(compile_data, compile_stats):
            try:
                prologue(*args, **kwargs)
            except Exception:  # as thunder does
                return None
            objects = {} if other.compiled.plan is None else bound(other.compiled.plan)
        Fp8State.of(compile_data).claims.update(other.compiled.claims)
        entry = other.programs.entry_of(prologue, objects)
        compile_stats.interpreter_cache.add(entry, other.compiled)
        compile_stats.last_backward_traces = entry.backward_traces  # the others thunder sets
        return entry
