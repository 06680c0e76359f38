"""Activations that backward computes again instead of saving them."""

from __future__ import annotations

import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from programs import LoraMLP
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import te_ex
from thunder_te_exec.recipe import Float8CurrentScaling
from traces import tensors_saved


def test_behind_a_fuser_activations_are_recomputed_unless_the_option_says_otherwise() -> None:
    saved, gradients = [], []
    for options in ({}, {"te_recompute_activations": False}):
        torch.manual_seed(0)
        module = LoraMLP().bfloat16()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora" in name)
        executors = [te_ex, torch_compile_ex]
        compiled = thunder.jit(module, executors=executors, te_fp8_recipe=Float8CurrentScaling(), **options)
        x = torch.randn(64, 64).bfloat16().requires_grad_()
        y = compiled(x)
        parameters = {p.data_ptr() for p in module.parameters()}
        saved.append(sum(t.nbytes for t in tensors_saved(y) if t.data_ptr() not in parameters))
        y.sum().backward()
        gradients.append([x.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
    # The product of gate and up, 64 x 96, and nothing else can be computed from what is saved.
    assert saved[1] - saved[0] == 64 * 96 * 2
    for a, b in zip(*gradients):
        assert (a.double() - b.double()).norm() <= 2.0**-7 * b.double().norm()
