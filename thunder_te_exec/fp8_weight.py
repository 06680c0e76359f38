"""A weight that is held in FP8 alone: what a frozen linear reads, and what everything else sees as its numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_te_exec.backends import Backend, Matrix, Operand, default_backend, dequantize
from thunder_te_exec.layouts import block_shape, operand_specs
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, TensorRole, fp8_dtype
from thunder_te_exec.state import AmaxGroup

__all__ = ["Fp8Weight", "dequantize_pair", "in_high_precision", "weight_format"]

aten = torch.ops.aten

_ROLE = TensorRole.WEIGHT


def weight_format(recipe: Any) -> tuple[Any, ...]:
    """What two recipes have in common whose quantized weights are interchangeable."""
    return fp8_dtype(recipe, _ROLE), block_shape(recipe, _ROLE)


class Fp8Weight(torch.Tensor):
    """A matrix (out_features, in_features) whose numbers are FP8 data times their ``scale_inv``.

    To te_ex it is an operand that needs no quantizing. To everything else it is a tensor of type ``dtype``: an
    operation computes with :meth:`dequantize`, made for it and dropped again. ``copy_``, and with it
    ``load_state_dict``, quantizes what it is given. Other writes raise, and so do slices of it; what is written to
    another view of it, such as its transpose, is lost.

    Args:
        operand: the row-wise matrix; the column-wise one too where it is kept for the input's gradient.
        recipe: it was quantized under; a private copy.
        dtype: in which it takes part in high-precision operations.
        fqn: fully qualified name, for messages.
        saves_fp8: whether a ``state_dict`` gets the FP8 pair, or high-precision numbers.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    OWN_ATTRIBUTES = frozenset(("operand", "recipe", "fqn", "saves_fp8", "format"))

    @staticmethod
    def __new__(cls, operand: Operand, recipe: Any, dtype: torch.dtype, fqn: str, saves_fp8: bool = False) -> Fp8Weight:
        data = operand.rowwise[0]
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, operand: Operand, recipe: Any, dtype: torch.dtype, fqn: str, saves_fp8: bool = False) -> None:
        self.operand, self.recipe, self.fqn, self.saves_fp8 = operand, recipe, fqn, saves_fp8
        self.format = weight_format(recipe)

    @classmethod
    def quantized(
        cls, weight: torch.Tensor, recipe: Any, fqn: str, *, keep_transposed: bool = False, saves_fp8: bool = False
    ) -> Fp8Weight:
        """``weight``, (out_features, in_features) on any device, quantized; on ``meta`` without numbers.

        Raises:
            RuntimeError: nothing can quantize on the weight's device.
        """
        operand = _quantize(weight.detach(), recipe, fqn, columnwise=keep_transposed)
        return cls(operand, copy.copy(recipe), weight.dtype, fqn, saves_fp8)

    def operand_of(self, format: tuple[Any, ...]) -> Operand:
        """The operand, for a linear whose recipe has weights of ``format``.

        Raises:
            RuntimeError: the format is another.
        """
        if format != self.format:
            kind = type(self.recipe).__name__
            raise RuntimeError(
                f"{self.fqn}: held in FP8 as {kind} has weights (type, block: {self.format}), and the recipe in force "
                f"reads {format}; use a recipe of that kind, or dequantize_(model) and quantize_frozen_ anew"
            )
        return self.operand

    @property
    def keeps_transposed(self) -> bool:
        return self.operand.columnwise is not None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(t.nbytes for matrix in self.operand if matrix is not None for t in matrix)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers in high precision, an ordinary tensor of the same shape."""
        with torch.no_grad():
            return dequantize(self.recipe, _ROLE, self.operand.rowwise).to(dtype or self.dtype)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The data, in torch's FP8 type, and ``scale_inv``, float32; both share memory with this."""
        data, scale_inv = self.operand.rowwise
        return data.view(self.format[0]), scale_inv

    def of_pair(self, data: torch.Tensor, scale_inv: torch.Tensor) -> Fp8Weight:
        """A weight like this of another :meth:`pair`, on any device.

        Raises:
            ValueError: shapes or types are not this weight's.
        """
        mine, theirs = (tuple((tuple(t.shape), t.dtype) for t in p) for p in (self.pair(), (data, scale_inv)))
        if mine != theirs:
            raise ValueError(f"expected FP8 data and scale_inv of {mine}, got {theirs}")
        return self._with(self._in_directions((data.view(torch.uint8), scale_inv), self.keeps_transposed))

    def keep_transposed_(self, keep: bool) -> None:
        """Make, or drop, the transposed copy."""
        if keep != self.keeps_transposed:
            self.operand = self._in_directions(self.operand.rowwise, keep)

    def _in_directions(self, rowwise: Matrix, keep_transposed: bool) -> Operand:
        if not keep_transposed:
            return Operand(rowwise, None)
        backend = _backend(self.recipe, rowwise[0].device, self.fqn)
        return Operand(rowwise, backend.transpose(self.recipe, _ROLE)(rowwise))

    def requantized(self, weight: torch.Tensor) -> Fp8Weight:
        """A weight like this of other numbers; the same bits where they are in FP8 already, with scales like this."""
        if isinstance(weight, Fp8Weight):
            if weight.format == self.format:
                return self._with(self._in_directions(weight.operand.rowwise, self.keeps_transposed))
            weight = weight.dequantize()
        return Fp8Weight.quantized(
            weight.to(self.dtype),
            self.recipe,
            self.fqn,
            keep_transposed=self.keeps_transposed,
            saves_fp8=self.saves_fp8,
        )

    def _with(self, operand: Operand, dtype: torch.dtype | None = None) -> Fp8Weight:
        return Fp8Weight(operand, self.recipe, dtype or self.dtype, self.fqn, self.saves_fp8)

    def _map(self, f: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> Fp8Weight:
        parts = (None if matrix is None else tuple(map(f, matrix)) for matrix in self.operand)
        return self._with(Operand(*parts), dtype)

    # --- as a tensor --------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SPECIAL and isinstance(args[0], Fp8Weight):
            return _SPECIAL[func](*args, **kwargs)
        written = next(_written_weights(func, args, kwargs), None)
        if written is not None:
            if func in _SLICES:
                raise RuntimeError(f"{written.fqn}: {func} of a weight that is held in FP8; take it of .dequantize()")
            raise RuntimeError(_would_round(written.fqn, str(func)))
        if torch.is_inference_mode_enabled():  # which leaves operations whole that are made of others: `to`, `narrow`
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(Fp8Weight, Fp8Weight.dequantize, (args, kwargs))
        return func(*args, **kwargs)

    # torch.nn.Module moves parameters by assigning their `data`.
    @property
    def data(self) -> Fp8Weight:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, Fp8Weight):
            raise RuntimeError(_would_round(self.fqn, "assigning .data"))
        torch.Tensor.data.__set__(self, new)  # shape, type and device
        self.operand, self.recipe, self.format = new.operand, new.recipe, new.format

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Weight:
        new = self._map(torch.Tensor.clone)
        new = torch.nn.Parameter(new, self.requires_grad) if isinstance(self, torch.nn.Parameter) else new
        return memo.setdefault(id(self), new)

    def __reduce_ex__(self, protocol: int) -> Any:
        is_parameter = isinstance(self, torch.nn.Parameter)
        parts = self.operand, self.recipe, self.dtype, self.fqn, self.saves_fp8
        return _rebuild, (*parts, is_parameter, self.requires_grad)

    def share_memory_(self) -> Fp8Weight:
        self._map(torch.Tensor.share_memory_)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind = type(self.recipe).__name__
        return f"Fp8Weight({self.fqn}, {tuple(self.shape)}, {kind}, {self.dtype}, device='{self.device}')"


def in_high_precision(weight: torch.Tensor) -> torch.Tensor:
    """The implementation of ``te_high_precision``: an ordinary tensor, whatever holds ``weight`` by now."""
    return weight.dequantize() if isinstance(weight, Fp8Weight) else weight


def dequantize_pair(data: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The numbers of a :meth:`Fp8Weight.pair`, float32 or higher.

    Raises:
        ValueError: ``scale_inv`` is neither one number nor one for each 128 x 128 block.
    """
    recipe = Float8CurrentScaling() if scale_inv.numel() == 1 else Float8BlockScaling()
    expected = fp8_dtype(recipe, _ROLE), operand_specs(recipe, _ROLE, tuple(data.shape))[1].shape
    if (data.dtype, tuple(scale_inv.shape)) != expected:
        found = data.dtype, tuple(scale_inv.shape)
        raise ValueError(f"FP8 data and scale_inv of {tuple(data.shape)} numbers: expected {expected}, got {found}")
    return dequantize(recipe, _ROLE, (data.view(torch.uint8), scale_inv))


def _rebuild(
    operand: Operand, recipe: Any, dtype: torch.dtype, fqn: str, saves_fp8: bool, is_parameter: bool, trained: bool
) -> Fp8Weight:
    weight = Fp8Weight(operand, recipe, dtype, fqn, saves_fp8)
    return torch.nn.Parameter(weight, requires_grad=trained) if is_parameter else weight


def _would_round(fqn: str, what: str) -> str:
    return (
        f"{fqn}: {what} would write to a weight that is held in FP8, and round the result to FP8; call "
        f"dequantize_(model) first (before merging adapters, for one)"
    )


def _written_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The FP8 weights that ``func`` writes to: in place, or in a slice that the caller may write to."""
    # Slices: the caller may write to one. Collectives: their schemas do not say what they write to.
    every = func in _SLICES or func.namespace == "c10d"
    for i, argument in enumerate(func._schema.arguments):
        writes = every or (argument.alias_info is not None and argument.alias_info.is_write)
        if writes:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (v for v in tree_leaves(value) if isinstance(v, Fp8Weight))


def _copy_(self: Fp8Weight, source: torch.Tensor, non_blocking: bool = False) -> Fp8Weight:
    same = isinstance(source, Fp8Weight) and source.format == self.format
    if not isinstance(source, Fp8Weight) and source.element_size() == 1:
        raise RuntimeError(
            f"{self.fqn}: copying {source.dtype} numbers without their scale into a weight that is held in FP8; load a "
            f"state_dict with weight_scale_inv into the model itself, not into what thunder.jit made of it"
        )
    if source.shape != self.shape:
        source = source.expand(self.shape)
    if not same or self.keeps_transposed != source.keeps_transposed:
        source = self.requantized(source if source.device == self.device else aten._to_copy(source, device=self.device))
    for mine, theirs in zip(self.operand, source.operand):
        if mine is not None:
            for a, b in zip(mine, theirs):
                a.copy_(b, non_blocking=non_blocking)
    # In a dispatch torch counts no writes, which it checks where a forward saved these tensors for its backward.
    torch.autograd.graph.increment_version([t for matrix in self.operand if matrix is not None for t in matrix])
    return self


def _to_copy(self: Fp8Weight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return aten._to_copy.default(self.dequantize(), dtype=dtype, **kwargs)
    return self._map(lambda t: aten._to_copy.default(t, **kwargs), dtype)


def _empty_like(self: Fp8Weight, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    kwargs.pop("memory_format", None)
    if kwargs.get("device") is None or (dtype is not None and not dtype.is_floating_point):
        return torch.empty(self.shape, **(kwargs | {"dtype": dtype or self.dtype, "device": self.device}))
    return self._map(lambda t: torch.empty_like(t, **kwargs), dtype)  # as Module.to_empty asks for


def _alias(self: Fp8Weight) -> Fp8Weight:
    return self._with(self.operand)


def _clone(self: Fp8Weight, *, memory_format: Any = None) -> Fp8Weight:
    return self._map(torch.Tensor.clone)


_SPECIAL: dict[Any, Callable[..., torch.Tensor]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: _empty_like,
}

#: Views that a caller may mean to write to; transposes and reshapes, which torch makes to read, are not among them.
_SLICES = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.diagonal.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.as_strided.default,
    }
)


def _quantize(weight: torch.Tensor, recipe: Any, fqn: str, *, columnwise: bool) -> Operand:
    if weight.is_meta:
        directions = (False, True) if columnwise else (False,)
        specs = [operand_specs(recipe, _ROLE, tuple(weight.shape), columnwise=d) for d in directions]
        matrices = [tuple(torch.empty(s.shape, dtype=s.dtype, device="meta") for s in matrix) for matrix in specs]
        return Operand(*matrices, *(() if columnwise else (None,)))
    backend = _backend(recipe, weight.device, fqn)
    with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode can't be saved for a backward
        weight = weight.contiguous()
        slot = None
        if isinstance(recipe, DelayedScaling):
            # The scale that a weight has for good, when its amax is in all of the history.
            group = AmaxGroup(1, recipe.amax_history_len, fp8_dtype(recipe, _ROLE), weight.device)
            slot = group.slot(0)
            quantize = _quantizer(backend, recipe, slot, weight.device, columnwise=False)
            for _ in range(recipe.amax_history_len if callable(recipe.amax_compute_algo) else 1):
                quantize(weight)
                backend.update_scales(group, recipe)
        return _quantizer(backend, recipe, slot, weight.device, columnwise=columnwise)(weight)


def _quantizer(
    backend: Backend, recipe: Any, slot: Any, device: torch.device, *, columnwise: bool
) -> Callable[[torch.Tensor], Operand]:
    return backend.quantizer(recipe, _ROLE, slot, device, rowwise=True, columnwise=columnwise)


def _backend(recipe: Any, device: torch.device, fqn: str) -> Backend:
    backend, why_not = default_backend(device, recipe)
    if backend is None:
        raise RuntimeError(f"{fqn}: nothing quantizes a weight on {device}: {why_not}")
    return backend
