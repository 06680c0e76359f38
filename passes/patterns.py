"""What passes recognize beside our own symbols: casts, sums, products and changes of shape, traced or run by torch.

With a fuser behind us a trace holds thunder's own symbols, without one those that torch runs; both are found by their
ids.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder_te_exec import compat  # noqa: F401  (before thunder)

import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.torchex import ex as torch_ex

from thunder_te_exec.symbols import is_linear_of_others

__all__ = [
    "Scaling",
    "Uses",
    "adds",
    "cast_from",
    "computes",
    "concatenated",
    "is_add",
    "is_fusible_code",
    "is_left_to_a_fuser",
    "is_matmul",
    "is_plain_linear",
    "is_pointwise",
    "is_reshape",
    "is_view",
    "nbytes",
    "recorded",
    "scaled",
    "scaled_by",
    "scaling_at",
    "scaling_of",
    "symbol_ids",
    "symbol_like",
    "transposed_from",
    "widened_from",
    "writes_in_place",
]


def symbol_ids(*names: str, primitives: tuple[Symbol, ...] = ()) -> frozenset:
    """Ids of thunder's symbols of these names, as traced and as run by torch, and of ``primitives``."""
    traced = (getattr(ltorch, name) for name in names)
    run = (torch_ex.opmap[name] for name in names if name in torch_ex.opmap)
    return frozenset(symbol.id for symbol in (*traced, *run, *primitives))


_CASTS = symbol_ids("to", primitives=(prims.convert_element_type,))
_WIDENS = {(dtypes.bfloat16, dtypes.float32), (dtypes.float16, dtypes.float32)}
_ADDS = symbol_ids("add", primitives=(prims.add,))
_WRITES = symbol_ids("copy_", primitives=(prims.copy_, prims.update_aliases))
_MULS = symbol_ids("mul", primitives=(prims.mul,))
_MATMULS = symbol_ids("matmul", primitives=(prims.matmul,))
_RESHAPES = symbol_ids("reshape", primitives=(prims.reshape,))
_POINTWISE = symbol_ids(
    *("add", "sub", "mul", "true_divide", "neg", "exp", "pow", "rsqrt", "reciprocal", "sigmoid", "silu", "tanh", "to"),
    primitives=(
        *(prims.add, prims.sub, prims.mul, prims.div, prims.neg, prims.exp, prims.pow, prims.rsqrt, prims.reciprocal),
        *(prims.tanh, prims.convert_element_type, prims.broadcast_in_dim, prims.shallow_copy),
    ),
)
# Of these a broadcast and a shallow copy give views.
_COMPUTES = (_POINTWISE | _MATMULS) - symbol_ids(primitives=(prims.broadcast_in_dim, prims.shallow_copy))
_SUMS = symbol_ids("sum", "mean", primitives=(prims.sum,))
_PERMUTES = symbol_ids("permute", primitives=(prims.transpose,))
_TRANSPOSES = _PERMUTES | symbol_ids("transpose")
_CATS = symbol_ids("cat", primitives=(prims.cat,))


def cast_from(bsym: BoundSymbol) -> TensorProxy | None:
    """What ``bsym`` casts to another type; None where it is no cast."""
    if bsym.sym.id not in _CASTS or not isinstance(bsym.output, TensorProxy):
        return None
    source = bsym.args[0]
    same = isinstance(source, TensorProxy) and (tuple(source.shape), source.device) == (
        tuple(bsym.output.shape),
        bsym.output.device,
    )
    return source if same else None


def widened_from(bsym: BoundSymbol) -> TensorProxy | None:
    """What ``bsym`` casts to a type that represents all its numbers; None where it does not."""
    source = cast_from(bsym)
    return source if source is not None and (source.dtype, bsym.output.dtype) in _WIDENS else None


def writes_in_place(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` changes a tensor that has other names, so that what is read before it must not be read after."""
    return bsym.sym.id in _WRITES


def adds(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is an addition of any kind."""
    return bsym.sym.id in _ADDS


def is_add(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` adds two tensors of its own shape and type."""
    if not adds(bsym) or bsym.kwargs.get("alpha") not in (None, 1):
        return False
    out = bsym.output
    return all(
        isinstance(a, TensorProxy) and (tuple(a.shape), a.dtype) == (tuple(out.shape), out.dtype) for a in bsym.args[:2]
    )


def scaled_by(bsym: BoundSymbol) -> tuple[TensorProxy, float] | None:
    """The tensor and the Python number that ``bsym`` multiplies; None where it does something else."""
    if bsym.sym.id not in _MULS:
        return None
    for tensor, number in (bsym.args[:2], bsym.args[1::-1]):
        if isinstance(tensor, TensorProxy) and type(number) in (int, float) and tensor.dtype == bsym.output.dtype:
            return tensor, number
    return None


def is_matmul(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` multiplies two matrices."""
    return bsym.sym.id in _MATMULS and all(isinstance(a, TensorProxy) and a.ndim == 2 for a in bsym.args[:2])


def is_plain_linear(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is a linear without bias that is not run in FP8."""
    return is_linear_of_others(bsym) and all(a is None for a in bsym.args[2:])


def is_reshape(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` changes the shape of its first argument, which keeps its order."""
    return bsym.sym.id in _RESHAPES


def is_view(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` changes the shape of its first argument, or the order of its dimensions."""
    return bsym.sym.id in _RESHAPES or bsym.sym.id in _TRANSPOSES


def transposed_from(bsym: BoundSymbol) -> TensorProxy | None:
    """The matrix that ``bsym`` transposes; None where it does something else."""
    if bsym.sym.id not in _PERMUTES or bsym.output.ndim != 2 or tuple(bsym.args[1]) != (1, 0):
        return None
    return bsym.args[0]


def concatenated(bsym: BoundSymbol, dim: int) -> list[TensorProxy]:
    """The tensors that ``bsym`` concatenates along dimension ``dim``; none where it does something else."""
    return list(bsym.args[0]) if bsym.sym.id in _CATS and bsym.args[1:] == (dim,) else []


def computes(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is a product or pointwise, and its result a tensor of its own, no view of what it reads."""
    if bsym.sym.id in _CASTS:
        source = cast_from(bsym)
        return source is not None and source.dtype != bsym.output.dtype
    return bsym.sym.id in _COMPUTES or is_linear_of_others(bsym)


def is_pointwise(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is a pointwise operation, a cast or a broadcast that a fuser can make part of a kernel."""
    return bsym.sym.id in _POINTWISE and bsym.sym.executor is None and isinstance(bsym.output, TensorProxy)


def is_fusible_code(bsym: BoundSymbol) -> bool:
    """Whether a fuser computes ``bsym`` in a kernel of its own making: pointwise code, a sum or a concatenation."""
    return is_pointwise(bsym) or (bsym.sym.id in _SUMS | _CATS and bsym.sym.executor is None)


def is_left_to_a_fuser(bsym: BoundSymbol) -> bool:
    """Whether ``bsym`` is claimed by no executor, and may run earlier or later: a fuser takes what stands together."""
    if bsym.sym.executor is not None or bsym.sym.id is prims.PrimIDs.RETURN:
        return False
    return not has_tags(bsym, {prims.OpTags.RANDOM_OP, prims.OpTags.DONT_DCE})


def nbytes(p: Proxy) -> int:
    """The bytes of a tensor; 0 of what is none."""
    return p.numel * p.dtype.bytes if isinstance(p, TensorProxy) else 0


class Uses:
    """Who makes and who reads each proxy of a trace; the trace's return is a reader too."""

    def __init__(self, trace: TraceCtx) -> None:
        self.producer: dict[str, BoundSymbol] = {}
        self.readers: dict[str, list[BoundSymbol]] = {}
        self.place: dict[int, int] = {}
        for i, bsym in enumerate(trace.bound_symbols):
            self.place[id(bsym)] = i
            for out in bsym.flat_proxy_outs:
                self.producer.setdefault(out.name, bsym)
            for name in {p.name for p in bsym.flat_proxy_args}:
                self.readers.setdefault(name, []).append(bsym)

    def only_reader(self, proxy: Proxy) -> BoundSymbol | None:
        """The one symbol that reads ``proxy``; None where there is another."""
        readers = self.readers.get(proxy.name, [])
        return readers[0] if len(readers) == 1 else None

    def readers_through_views(self, proxy: Proxy) -> list[BoundSymbol]:
        """What reads ``proxy`` or views of it and gives no view, once for each that it reads."""
        found, views = [], [proxy]
        while views:
            for reader in self.readers.get(views.pop().name, ()):
                if is_view(reader):
                    views.append(reader.output)
                else:
                    found.append(reader)
        return found


def symbol_like(bsym: BoundSymbol, name: str) -> Symbol:
    """The symbol of ``name`` as ``bsym`` is one: torch's where torch runs ``bsym``, else thunder's."""
    return torch_ex.opmap[name] if bsym.sym.executor is torch_ex else getattr(ltorch, name)


def recorded(trace: TraceCtx, like: BoundSymbol, symbol: Symbol, *args, **kwargs) -> list[BoundSymbol]:
    """The call ``symbol(*args, **kwargs)`` as bound symbols of ``trace``, the last of which gives its result.

    They get the tags of ``like``, which say whether they belong to forward or backward.
    """
    with tracectx(trace):
        scope: list[BoundSymbol] = []
        trace.push_scope(scope)
        symbol(*args, **kwargs)
        trace.pop_scope()
    for bsym in scope:
        bsym.tags |= like.tags
    return scope


class Scaling(NamedTuple):
    """``result = number * source``, by ``steps``: a multiplication, between two casts where there are any."""

    source: TensorProxy
    number: float
    steps: tuple[BoundSymbol, ...]

    @property
    def result(self) -> TensorProxy:
        return self.steps[-1].output

    @property
    def key(self) -> str:
        """The same for numbers that give the same results: 0.0 and -0.0, which are equal, do not."""
        return str(float(self.number))


def scaling_at(bsym: BoundSymbol, uses: Uses) -> Scaling | None:
    """The scaling whose last step is ``bsym``, its inner results being read by it alone; None in float16."""
    if getattr(bsym.output, "dtype", dtypes.float16) == dtypes.float16:
        return None
    if scaled_by(bsym) is not None:
        source, number = scaled_by(bsym)
        reader = uses.only_reader(bsym.output)
        inner = reader is not None and cast_from(reader) is not None
        return None if inner else Scaling(source, number, (bsym,))
    middle = cast_from(bsym)
    mul = uses.producer.get(middle.name) if middle is not None else None
    if mul is None or scaled_by(mul) is None or uses.only_reader(middle) is not bsym:
        return None
    wide, number = scaled_by(mul)
    up = uses.producer.get(wide.name)
    source = widened_from(up) if up is not None else None
    if source is None or source.dtype != bsym.output.dtype:
        return None
    return Scaling(source, number, (up, mul, bsym))


def scaling_of(source: TensorProxy, uses: Uses) -> Scaling | None:
    """The scaling that is all that reads ``source``; None where something else does, or there is none."""
    proxy = source
    for _ in range(3):  # steps
        reader = uses.only_reader(proxy)
        if reader is None or not isinstance(reader.output, TensorProxy):
            return None
        scaling = scaling_at(reader, uses)
        if scaling is not None:
            return scaling if scaling.source is source else None
        proxy = reader.output
    return None


def scaled(trace: TraceCtx, source: TensorProxy, scaling: Scaling, like: BoundSymbol) -> TensorProxy:
    """``source`` multiplied as ``scaling`` does, by symbols that are added to ``trace`` with the tags of ``like``."""
    for step in scaling.steps:
        old = next(a for a in step.args if isinstance(a, TensorProxy))
        # A number of another type would be cast, by a symbol without tensors that fusers cannot take.
        args = [source if a is old else float(a) if type(a) is int else a for a in step.args]
        trace.bound_symbols += recorded(trace, like, step.sym, *args, **step.kwargs)
        source = trace.bound_symbols[-1].output
    return source
