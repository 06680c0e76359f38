"""Which linears run in FP8, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from thunder_te_exec import compat

from thunder.core import dtypes
from thunder.core.devices import to_torch_device
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_te_exec.cache import EntriesByContext
from thunder_te_exec.layouts import alignment
from thunder_te_exec.names import check_parameter_names
from thunder_te_exec.recipe import NVFP4BlockScaling
from thunder_te_exec.settings import Settings
from thunder_te_exec.state import Fp8State
from thunder_te_exec.symbols import is_unclaimed_linear

__all__ = ["Claim", "claims", "decide", "is_thin", "note_linears_of_others", "why_not_sizes", "why_not_worth"]

_DTYPES = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


@dataclass(frozen=True)
class Claim:
    """A decision about one linear.

    Attributes:
        weight: fully qualified name of the weight parameter; for a jitted function the argument's name, for a weight
            that is computed in the program "computed (its name in the trace)".
        weight_shape: (out_features, in_features).
        input_shape: shape of the input, (..., in_features).
        claimed: whether it runs in FP8.
        reason: why it does not; "" for a claimed linear.
        recipe: class of the recipe that it was decided under; "" where FP8 was off, or te_ex was not asked.
    """

    weight: str
    weight_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    claimed: bool
    reason: str
    recipe: str = ""


def claims(jitted: Any) -> tuple[Claim, ...]:
    """The linears that ``jitted`` has been compiled with so far, which run in FP8, and why the others do not.

    One entry for each linear, signature and class of recipe, in the order in which they were first met; empty before
    the first call.

    Raises:
        TypeError: ``jitted`` did not come from ``thunder.jit`` or ``jit_blocks``.
    """
    states = map(Fp8State.of, compat.all_compile_data(jitted))
    return tuple(replace(claim, weight=s.full_name(claim.weight)) for s in states for claim in s.claims.values())


def note_linears_of_others(trace: TraceCtx) -> None:
    """Keep a claim, with its reason, for each linear of ``trace`` that another executor took before te_ex saw it."""
    cd, cs = compat.current_compilation()
    state = Fp8State.of(cd)
    decided = {key[0] for key in state.claims}
    for bsym in _linears_of_others(trace.bound_symbols):
        a, w, *_ = bsym.args
        weight = state.names.of(w, trace, cs.last_prologue_traces[-1]) or f"computed ({w.name})"
        if weight not in decided:
            reason = "taken by another executor: put te_ex before it in the list of executors"
            key = (weight, _signature(a), _signature(w))
            claim = state.claims.setdefault(key, Claim(weight, tuple(w.shape), tuple(a.shape), False, reason))
            EntriesByContext.of(cd, cs).decided(cs.last_traces, key, claim)


def _linears_of_others(bound_symbols: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    for bsym in bound_symbols:
        if is_unclaimed_linear(bsym):
            yield bsym
        elif bsym.sym.is_fusion:
            yield from _linears_of_others(bsym.subsymbols)


def is_thin(out_features: int, in_features: int) -> bool:
    """Whether quantizing costs more than an FP8 GEMM saves: the shape of a low-rank adapter.

    ``min(out, in) < 32``, or ``min(out, in) <= 128`` and the other at least 16 times larger.
    """
    small, large = sorted((out_features, in_features))
    return small < 32 or (small <= 128 and large >= 16 * small)


def decide(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None) -> Claim | None:
    """Decide on ``linear(a, w, bias)`` in the compilation that is under way.

    The decision is made once for each linear and signature and kept on the jitted function. None where the arguments
    are not what a linear has.

    Raises:
        TypeError, ValueError, NotImplementedError: an option or the recipe is not usable (``Settings.current``).
        RuntimeError: ``te_filter`` raised; its exception is the cause.
    """
    cd, cs = compat.current_compilation()
    if cd is None or not (isinstance(a, TensorProxy) and isinstance(w, TensorProxy)):
        return None
    state = Fp8State.of(cd)
    device = to_torch_device(a.device)
    settings = Settings.current(cd, device)
    entries = EntriesByContext.of(cd, cs)
    entries.depends_on(cs.last_traces, device, settings)
    weight = state.names.of(w, cs.last_traces[-1], cs.last_prologue_traces[-1]) or f"computed ({w.name})"
    key = (weight, _signature(a), _signature(w), _signature(bias), settings.key)
    if key not in state.claims:
        if not state.claims:
            check_parameter_names(cd.fn)
        reason = _why_not(a, w, bias, weight, settings, state)
        recipe = type(settings.recipe).__name__ if settings.enabled else ""
        state.claims[key] = Claim(weight, tuple(w.shape), tuple(a.shape), reason is None, reason or "", recipe)
    entries.decided(cs.last_traces, key, state.claims[key])
    return state.claims[key]


def _signature(t: TensorProxy | None) -> Any:
    return None if t is None else (tuple(t.shape), t.dtype, str(t.device))


def _why_not(
    a: TensorProxy, w: TensorProxy, bias: TensorProxy | None, name: str, settings: Settings, state: Fp8State
) -> str | None:
    if not settings.enabled:
        return "FP8 is off: compiled inside autocast(enabled=False)"
    if settings.backend is None:
        settings.warn_no_backend(state)
        return settings.why_no_backend
    return (
        _why_not_tensors(a, w, bias, settings.recipe)
        or why_not_worth(tuple(w.shape), state.full_name(name), settings.te_filter)
        or _why_not_shape(a, w, settings.recipe)
    )


def _why_not_tensors(a: TensorProxy, w: TensorProxy, bias: TensorProxy | None, recipe: Any) -> str | None:
    if w.ndim != 2 or a.ndim < 1:
        return f"weight of rank {w.ndim} and input of rank {a.ndim}: expected a matrix and at least a vector"
    if not all(type(dim) is int for dim in (*a.shape, *w.shape)):
        return "symbolic shapes"
    tensors = [t for t in (a, w, bias) if t is not None]
    if len({t.device for t in tensors}) > 1:
        return f"operands on different devices: {', '.join(str(t.device) for t in tensors)}"
    # Transformer Engine quantizes to FP4, with a Hadamard transform, from bfloat16 alone.
    allowed = (dtypes.bfloat16,) if isinstance(recipe, NVFP4BlockScaling) else _DTYPES
    if len({t.dtype for t in tensors}) > 1 or a.dtype not in allowed:
        found, expected = (", ".join(map(str, ds)) for ds in ((t.dtype for t in tensors), allowed))
        return f"dtypes {found}: expected one of {expected} for all"
    return None


def _why_not_shape(a: TensorProxy, w: TensorProxy, recipe: Any) -> str | None:
    out_features, in_features = w.shape
    sizes = {"input rows": math.prod(a.shape[:-1]), "in_features": in_features, "out_features": out_features}
    return why_not_sizes(sizes, recipe)


def why_not_sizes(sizes: dict[str, int], recipe: Any) -> str | None:
    """Why the GEMMs of ``recipe`` cannot contract over one of ``sizes``, by what they are of; None if they can."""
    multiple = alignment(recipe)
    for what, size in sizes.items():
        if size % multiple or size == 0:
            return f"{size} {what}: FP8 GEMMs need a multiple of {multiple}"
    return None


def why_not_worth(
    shape: tuple[int, ...], name: str, te_filter: Callable[[str, tuple[int, ...]], bool] | None
) -> str | None:
    """Why a linear whose weight has this shape and name is left out by choice; None where it is not.

    Raises:
        RuntimeError: ``te_filter`` raised; its exception is the cause.
    """
    if te_filter is not None:
        try:
            wanted = te_filter(name, shape)
            return None if wanted else f"te_filter returned {wanted!r}"
        except Exception as e:
            raise RuntimeError(f"te_filter raised for {name!r} of shape {shape}: {type(e).__name__}: {e}") from e
    if is_thin(*shape):
        return f"thin ({shape[0]} x {shape[1]}): quantizing costs more than the FP8 GEMM saves (te_filter overrides)"
    return None
