"""Activations that backward computes again: what is saved instead, where they are computed, and what stays saved."""

from __future__ import annotations

import sys

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from programs import LoraMLP, lora_mlp_in_bfloat16
from steps import same
from thunder.core import prims
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import te_ex
from thunder_te_exec.passes.patterns import is_matmul, is_pointwise
from thunder_te_exec.recipe import Float8CurrentScaling
from thunder_te_exec.symbols import is_te_backward
from torch import nn
from traces import joint_trace, tensors_saved


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


def test_an_option_that_is_no_boolean_is_refused() -> None:
    with pytest.raises(TypeError, match="te_recompute_activations: expected True or False, got 'yes'"):
        thunder.jit(nn.Linear(32, 32), executors=[te_ex], te_recompute_activations="yes")(torch.randn(32, 32))


def saved_pointwise(trace: TraceCtx) -> list[BoundSymbol]:
    """What makes, in forward, a tensor that backward reads, if a fuser could compute it again."""
    forward = {
        o.name: b for b in trace.bound_symbols if BoundSymbolTag.BACKWARD not in b.tags for o in b.flat_proxy_outs
    }
    backward = [b for b in trace.bound_symbols if BoundSymbolTag.BACKWARD in b.tags]
    backward = [b for b in backward if b.sym.id is not prims.PrimIDs.GET_GRAD]  # which names an output
    names = dict.fromkeys(p.name for b in backward for p in b.flat_proxy_args if p.name in forward)
    return [forward[name] for name in names if is_pointwise(forward[name])]


def test_with_activations_saved_only_what_a_product_reads_is() -> None:
    module, x = lora_mlp_in_bfloat16()
    _, after = joint_trace(module, x, behind=[torch_compile_ex], te_recompute_activations=False)
    # What down's second matrix reads, and h, both in bfloat16; what h's own gradient reads is computed in its kernel.
    a, h = saved_pointwise(after)
    assert [tuple(b.output.shape) for b in (a, h)] == [(2, 16, 8), (2, 16, 96)]
    assert {b.output.dtype for b in (a, h)} == {thunder.bfloat16}


def products_of_gradients(trace: TraceCtx, *shape: int) -> list[int]:
    return [
        i
        for i, b in enumerate(trace.bound_symbols)
        if BoundSymbolTag.BACKWARD in b.tags and is_matmul(b) and tuple(b.output.shape) == shape
    ]


def test_a_gradient_waits_for_the_kernel_that_reads_what_its_activation_is_computed_from() -> None:
    _, after = joint_trace(*lora_mlp_in_bfloat16(), behind=[torch_compile_ex])
    down, up, gate = [i for i, b in enumerate(after.bound_symbols) if is_te_backward(b)]
    (of_down,) = products_of_gradients(after, 8, 96)  # lora_A of down, from the product of silu(gate) and up
    assert down < of_down < up
    made = {p.name for p in after.args}
    for bsym in after.bound_symbols:
        assert all(p.name in made for p in bsym.flat_proxy_args)
        made |= {out.name for out in bsym.flat_proxy_outs}


class WithTrainedHead(nn.Module):
    """A second, trained linear reads the product of gate and up; its gradient reads another tensor of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.head = LoraMLP(), nn.Linear(96, 96, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = nn.functional.silu(self.mlp.gate(x)) * self.mlp.up(x)
        return self.mlp.down(h), self.head(h)


def test_no_gradient_waits_that_would_keep_something_large() -> None:
    module = WithTrainedHead().bfloat16()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora" in name or "head" in name)
    x = torch.randn(2, 16, 64).bfloat16().requires_grad_()
    only_frozen = {"te_filter": lambda name, shape: "base" in name}
    _, after = joint_trace(module, x, behind=[torch_compile_ex], **only_frozen)
    down = next(i for i, b in enumerate(after.bound_symbols) if is_te_backward(b))
    (of_head,), (of_down,) = products_of_gradients(after, 96, 96), products_of_gradients(after, 8, 96)
    assert of_head < down and of_down < down


@pytest.mark.parametrize("te_recompute_activations", (True, False))
def test_numbers_are_those_of_gradients_that_do_not_wait(te_recompute_activations, monkeypatch) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = LoraMLP()  # in float32, where nothing is rounded between kernels
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora" in name)
        options = {"te_recompute_activations": te_recompute_activations, "te_fp8_recipe": Float8CurrentScaling()}
        compiled = thunder.jit(module, executors=[te_ex, torch_compile_ex], **options)
        x = torch.randn(64, 64).requires_grad_()
        y = compiled(x)
        y.sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.requires_grad)]

    waiting = run()
    recomputed = sys.modules["thunder_te_exec.passes.recomputed_activations"]  # the package has the pass of that name
    monkeypatch.setattr(recomputed, "_later_places", lambda trace, plans: {})
    assert same(waiting, run())
