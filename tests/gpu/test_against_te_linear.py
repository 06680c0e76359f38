"""te_ex against eager te.Linear with the same weights, recipe and inputs: the same bits, step after step."""

from __future__ import annotations

import pytest
import thunder
import torch
from recipes import FLOAT8_BLOCKS, RECIPES
from te_modules import te_linear
from thunder_te_exec import autocast, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from torch import nn

# TE rounds a float32 bias to bfloat16, which a test of its own bounds.
DTYPES_AND_BIAS = [
    *((dtype, bias) for dtype in (torch.bfloat16, torch.float16) for bias in (False, True)),
    (torch.float32, False),
]
DIMS = (64, 128, 96, 64)
ALL = RECIPES | FLOAT8_BLOCKS


def stack(dtype: torch.dtype, bias: bool, frozen: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(k, n, bias=bias) for k, n in zip(DIMS, DIMS[1:]))).to("cuda", dtype)
    for i in frozen:
        module[i].requires_grad_(False)
    return module


def six_steps(dtype: torch.dtype, bias: bool, frozen: tuple[int, ...], recipe, input_grad: bool = True):
    """(name, ours, theirs) of every output and gradient of six optimizer steps."""
    import transformer_engine.pytorch as te

    ours = stack(dtype, bias, frozen)
    theirs = nn.Sequential(*map(te_linear, ours))
    compiled = thunder.jit(ours, executors=[te_ex])
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (ours, theirs)]
    steppers = [torch.optim.SGD(ps, lr=0.05) for ps in trained if ps]
    for step in range(6):
        torch.manual_seed(step)
        x = (torch.randn(2, 32, DIMS[0], device="cuda") * 1.5**step).to(dtype)
        g = (torch.randn(2, 32, DIMS[-1], device="cuda") * 0.1).to(dtype)
        a, b = x.clone().requires_grad_(input_grad), x.clone().requires_grad_(input_grad)
        with te.autocast(enabled=True, recipe=recipe):
            y, expected = compiled(a), theirs(b)
        y.backward(g)
        expected.backward(g)
        yield f"{step}.y", y, expected
        if input_grad:
            yield f"{step}.x.grad", a.grad, b.grad
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
            assert (p.grad is None) == (not p.requires_grad)
            if p.grad is not None:
                yield f"{step}.{name}.grad", p.grad, q.grad
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()


@pytest.mark.parametrize("frozen", ((), (0, 2), (0, 1, 2)), ids=str)
@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("dtype, bias", DTYPES_AND_BIAS, ids=str)
def test_outputs_and_gradients_of_six_steps_are_te_linears_bits(dtype, bias, recipe, frozen) -> None:
    for name, ours, theirs in six_steps(dtype, bias, frozen, ALL[recipe]()):
        assert torch.equal(ours, theirs), f"{name}: {(ours - theirs).abs().max():.3g} apart"


@pytest.mark.parametrize("recipe", ("delayed", "current", "blocks"))
def test_without_an_input_gradient_the_bits_are_te_linears_too(recipe) -> None:
    for name, ours, theirs in six_steps(torch.bfloat16, True, (1,), ALL[recipe](), input_grad=False):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("recipe", ("delayed", "current", "blocks"))
def test_a_float32_bias_keeps_the_bits_that_te_rounds_away(recipe) -> None:
    """One linear: the outputs differ by TE's rounding of the bias to bfloat16 (2**-9 of it), gradients do not."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    linear = nn.Linear(64, 64).cuda()
    theirs = te_linear(linear)
    x = torch.randn(32, 64, device="cuda")
    recipe = ALL[recipe]()
    with te.autocast(recipe=recipe):
        y, expected = thunder.jit(linear, executors=[te_ex])(x), theirs(x)
    y.sum().backward()
    expected.sum().backward()
    rounded = linear.bias.to(torch.bfloat16).float() - linear.bias
    # Adding in another order rounds the last bit of float32 differently.
    assert ((y + rounded) - expected).abs().max() <= 2 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert torch.equal(linear.weight.grad, theirs.weight.grad) and torch.equal(linear.bias.grad, theirs.bias.grad)


def test_our_autocast_is_te_autocast_where_te_is_installed() -> None:
    import transformer_engine.pytorch as te
    from thunder_te_exec.autocast import active_context

    recipe = Float8CurrentScaling()
    with autocast(recipe=recipe):
        assert active_context().recipe is recipe
        with te.autocast(enabled=False):
            assert not active_context().enabled
        with te.autocast(recipe=DelayedScaling()), autocast(enabled=False):
            assert not active_context().enabled
    assert active_context() is None


def test_the_default_recipe_is_tes_for_the_device() -> None:
    from transformer_engine.pytorch.quantization import get_default_recipe

    module = stack(torch.bfloat16, False, ())
    x = torch.randn(32, DIMS[0], device="cuda", dtype=torch.bfloat16)
    default = thunder.jit(module, executors=[te_ex])(x)
    assert torch.equal(default, thunder.jit(module, executors=[te_ex], te_fp8_recipe=get_default_recipe())(x))
