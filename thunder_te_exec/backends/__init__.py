"""Backends: what quantizes and multiplies. One interface, two implementations."""

from __future__ import annotations

from typing import Any

import torch

from thunder_te_exec.backends.base import Backend, Gemm, Matrix, Operand, Quantize
from thunder_te_exec.backends.reference import ReferenceBackend, dequantize
from thunder_te_exec.backends.te import TransformerEngineBackend

__all__ = ["BACKENDS", "Backend", "Gemm", "Matrix", "Operand", "Quantize", "default_backend", "dequantize"]

#: By the name that ``thunder.jit(..., te_backend=name)`` takes.
BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (TransformerEngineBackend, ReferenceBackend)}


def default_backend(device: torch.device, recipe: Any) -> tuple[Backend | None, str]:
    """The backend for ``recipe`` on ``device`` where the user named none; (None, reason) where there is none.

    Transformer Engine on CUDA, the reference on the CPU. CUDA without Transformer Engine gets none: the reference
    would be slower there than no FP8 at all.
    """
    if device.type == "cpu":
        return ReferenceBackend(), ""
    if device.type == "cuda":
        backend = TransformerEngineBackend()
        why = backend.why_not(device, recipe)
        return (None, why) if why else (backend, "")
    return None, f"no backend for device type {device.type!r}"
