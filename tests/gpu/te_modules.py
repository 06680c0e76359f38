"""Transformer Engine's modules, made of torch's."""

from __future__ import annotations

from torch import nn

__all__ = ["te_linear"]


def te_linear(linear: nn.Linear) -> nn.Module:
    """A ``te.Linear`` with the weight and bias of ``linear``, its type, and what of them is frozen."""
    import transformer_engine.pytorch as te

    n, k, dtype = linear.out_features, linear.in_features, linear.weight.dtype
    copy = te.Linear(k, n, bias=linear.bias is not None, params_dtype=dtype, device="cuda")
    for name, parameter in linear.named_parameters():
        theirs = getattr(copy, name)
        theirs.data.copy_(parameter)
        theirs.requires_grad_(parameter.requires_grad)
    return copy
