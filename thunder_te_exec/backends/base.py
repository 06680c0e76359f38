"""The interface of a backend.

All three products of a linear are one GEMM of two FP8 matrices that are both row-major along the contraction, which is
how Hopper reads them: ``out[m, n] = sum_k a[m, k] * b[n, k]``.

======  ============================  ==============================
fprop   a = input, row-wise (M, K)    b = weight, row-wise (N, K)
dgrad   a = grad, row-wise (M, N)     b = weight, column-wise (K, N)
wgrad   a = grad, column-wise (N, M)  b = input, column-wise (K, M)
======  ============================  ==============================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder_te_exec.recipe import TensorRole
from thunder_te_exec.state import AmaxGroup, AmaxSlot

__all__ = ["Backend", "Gemm", "Operand", "Quantize"]


class Operand(NamedTuple):
    """A quantized tensor of R rows and C columns, in the directions that were asked for.

    ``rowwise``: uint8 (R, C) or None. ``columnwise``: uint8 (C, R), the transpose, or None. ``scale_inv``: float32
    (1,), what FP8 values are multiplied with to get the tensor's values back.
    """

    rowwise: torch.Tensor | None
    columnwise: torch.Tensor | None
    scale_inv: torch.Tensor


#: Quantizes a contiguous 2-D tensor. Made when compiling, so that a call looks nothing up.
Quantize = Callable[[torch.Tensor], Operand]


#: ``gemm(a, a_scale_inv, b, b_scale_inv, bias)``: ``a @ b.T + bias`` of the dequantized matrices, (m, n). ``a`` and
#: ``b`` are uint8 (m, k) and (n, k), the scales float32 (1,), ``bias`` (n,) in the output's type, or None.
Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Backend(ABC):
    """Quantizers, GEMMs and the scale update."""

    name: str

    @abstractmethod
    def why_not(self, device: torch.device) -> str:
        """Why this backend cannot run on ``device``, or ""."""

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

        Under delayed scaling it uses the scale in ``slot`` and raises ``slot.amax`` to the tensor's amax; under
        current scaling ``slot`` is None.
        """

    @abstractmethod
    def gemm(
        self, a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype, *, use_split_accumulator: bool
    ) -> Gemm:
        """A GEMM of FP8 matrices of the given types.

        Float32-accumulated, and rounded once to ``out_dtype``; ``use_split_accumulator=False`` allows Hopper's faster,
        less exact accumulation.
        """

    @abstractmethod
    def update_scales(self, group: AmaxGroup, recipe: Any) -> None:
        """Delayed scaling: take this step's amaxes into the history and compute the next step's scales, in place."""
