"""The interface of a backend.

All three products of a linear are one GEMM of two quantized matrices that are both row-major along the contraction,
which is how Hopper reads them: ``out[m, n] = sum_k a[m, k] * b[n, k]``.

======  ============================  ==============================
fprop   a = input, row-wise (M, K)    b = weight, row-wise (N, K)
dgrad   a = grad, row-wise (M, N)     b = weight, column-wise (K, N)
wgrad   a = grad, column-wise (N, M)  b = input, column-wise (K, M)
======  ============================  ==============================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from thunder_te_exec.layouts import block_shape, operand_specs
from thunder_te_exec.recipe import Product, TensorRole
from thunder_te_exec.state import AmaxGroup, AmaxSlot

__all__ = ["OPERANDS", "Backend", "Gemm", "Matrix", "Operand", "Quantize"]

#: A quantized matrix: its data, its scale_inv (what the data are multiplied with to get the numbers back), and under
#: NVFP4 its amax; shapes and types are those of ``thunder_te_exec.layouts``.
Matrix = tuple[torch.Tensor, ...]


class Operand(NamedTuple):
    """A quantized tensor of R rows and C columns, in the directions that were asked for.

    ``rowwise``: the matrix (R, C) or None. ``columnwise``: the matrix (C, R), the transpose, or None.
    """

    rowwise: Matrix | None
    columnwise: Matrix | None


#: Quantizes a contiguous 2-D tensor. Made when compiling, so that a call looks nothing up.
Quantize = Callable[[torch.Tensor], Operand]


class Gemm(Protocol):
    """``a @ b.T + bias`` of the dequantized matrices (m, k) and (n, k): (m, n).

    ``bias`` is (n,), in the output's type, or None. ``into``, (m, n) in the output's type and contiguous, is added and
    is where the result is written, rounded once.
    """

    def __call__(
        self, a: Matrix, b: Matrix, bias: torch.Tensor | None, into: torch.Tensor | None = None
    ) -> torch.Tensor: ...


#: By product, what ``a`` and ``b`` are: a tensor's role, and whether it is the column-wise copy.
OPERANDS: dict[Product, tuple[tuple[TensorRole, bool], tuple[TensorRole, bool]]] = {
    Product.FPROP: ((TensorRole.INPUT, False), (TensorRole.WEIGHT, False)),
    Product.DGRAD: ((TensorRole.GRAD_OUTPUT, False), (TensorRole.WEIGHT, True)),
    Product.WGRAD: ((TensorRole.GRAD_OUTPUT, True), (TensorRole.INPUT, True)),
}


class Backend(ABC):
    """Quantizers, GEMMs and the scale update."""

    name: str

    @abstractmethod
    def why_not(self, device: torch.device, recipe: Any) -> str:
        """Why this backend cannot run ``recipe`` on ``device``, or ""."""

    @abstractmethod
    def quantizer(
        self,
        recipe: Any,
        role: TensorRole,
        slot: AmaxSlot | None,
        device: torch.device,
        *,
        rowwise: bool,
        columnwise: bool,
    ) -> Quantize:
        """A function that quantizes tensors of ``role`` under ``recipe``.

        Under delayed scaling it uses the scale in ``slot`` and raises ``slot.amax`` to the tensor's amax; under other
        recipes ``slot`` is None.
        """

    @abstractmethod
    def gemm(self, recipe: Any, product: Product, out_dtype: torch.dtype) -> Gemm:
        """The GEMM of ``product`` for matrices that were quantized under ``recipe``.

        Float32-accumulated, and rounded once to ``out_dtype``; where the recipe has ``use_split_accumulator=False``
        for the product, Hopper's faster, less exact accumulation is allowed.
        """

    def transpose(self, recipe: Any, role: TensorRole) -> Callable[[Matrix], Matrix]:
        """A function that makes the column-wise matrix of a tensor from its row-wise one, with the bits of a quantizer.

        For recipes and roles that are ``layouts.is_transposable``.
        """
        transpose_data = self._data_transpose()
        if block_shape(recipe, role) is None:
            return lambda matrix: (transpose_data(matrix[0]), matrix[1])

        def transpose_blocks(matrix: Matrix) -> Matrix:
            data, scale_inv = matrix
            (spec, scale_spec) = operand_specs(recipe, role, tuple(data.shape), columnwise=True)
            transposed = scale_inv.new_zeros(scale_spec.shape)
            down, across = (-(-n // b) for n, b in zip(spec.shape, block_shape(recipe, role)))
            transposed[:, :across] = scale_inv[:across, :down].t()
            return transpose_data(data), transposed

        return transpose_blocks

    def _data_transpose(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from uint8 (R, C) to its transpose, contiguous (C, R)."""
        return lambda data: data.t().contiguous()

    @abstractmethod
    def update_scales(self, group: AmaxGroup, recipe: Any) -> None:
        """Delayed scaling: take this step's amaxes into the history and compute the next step's scales, in place."""
