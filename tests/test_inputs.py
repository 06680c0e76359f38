"""Inputs that are not as in the textbook: NaN, infinities, strides."""

from __future__ import annotations

import pytest
import thunder
import torch
from oracle import E4M3, Scaling, oracle_linear
from thunder_te_exec import te_ex
from thunder_te_exec.backends.reference import ReferenceBackend
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling, TensorRole
from thunder_te_exec.state import AmaxGroup
from torch import nn
from traces import jitted

CPU = torch.device("cpu")
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def make(kind: str) -> torch.Tensor:
    base = torch.arange(1, 1 + 64 * 64, dtype=torch.float32).reshape(64, 64) / 1000
    return {
        "contiguous": lambda: base[:32, :32].contiguous(),
        "transposed": lambda: base[:32, :32].t(),
        "strided": lambda: base[::2, ::2],
        "offset": lambda: base[7:39, 5:37],
        "expanded": lambda: base[:1, :32].expand(32, 32),
        "three-dimensional, transposed": lambda: base.reshape(2, 32, 64)[:, :, :32].transpose(0, 1),
    }[kind]()


KINDS = ("transposed", "strided", "offset", "expanded", "three-dimensional, transposed")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operand", ("input", "weight", "gradient"))
def test_strides_of_an_operand_do_not_change_a_bit(operand, kind) -> None:
    if operand == "weight" and kind.startswith("three"):
        kind = "strided"  # a weight is a matrix

    def run(tensor: torch.Tensor) -> list[torch.Tensor]:
        operands = {name: make("contiguous") for name in ("input", "weight", "gradient")} | {operand: tensor}
        x, w = (operands[name].detach().requires_grad_() for name in ("input", "weight"))
        y = jitted(torch.nn.functional.linear, x, w)(x, w)
        g = operands["gradient"]
        y.backward(g if g.shape == y.shape else torch.ones_like(y))
        return [y, x.grad, w.grad]

    strided = make(kind)
    if operand == "gradient" and strided.dim() == 3:
        strided = strided[0]
    for a, b in zip(run(strided), run(strided.clone(memory_format=torch.contiguous_format))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", (DelayedScaling, Float8CurrentScaling), ids=lambda r: r.__name__)
def test_a_nan_propagates_to_its_row_and_nowhere_else(recipe) -> None:
    torch.manual_seed(0)  # the largest number, which scales all others, stays
    linear = nn.Linear(32, 32, bias=False)
    x = torch.randn(32, 32)
    clean = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe())(x)
    x[3, 5] = float("nan")
    y = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe())(x)
    assert y[3].isnan().all()
    rest = torch.arange(32) != 3
    assert torch.equal(y[rest], clean[rest])


@pytest.mark.parametrize("value", (float("inf"), -float("inf")))
def test_an_infinity_saturates_and_a_scale_that_it_would_spoil_stays(value) -> None:
    group = AmaxGroup(1, 4, torch.float8_e4m3fn, CPU)
    group.scale.fill_(2.0)
    recipe = DelayedScaling(amax_history_len=4)
    backend = ReferenceBackend()
    x = torch.tensor([[1.0, value]])
    q = backend.quantizer(recipe, TensorRole.INPUT, group.slot(0), CPU, rowwise=True, columnwise=False)(x)
    assert E4M3_VALUES[q.rowwise[0].long()].tolist() == [[2.0, 448.0 if value > 0 else -448.0]]
    backend.update_scales(group, recipe)
    assert group.scale.item() == 2.0 and group.history[-1, 0].item() == float("inf")
    # Current scaling has no earlier scale to keep: it falls back to 1.
    current = Float8CurrentScaling()
    q = backend.quantizer(current, TensorRole.INPUT, None, CPU, rowwise=True, columnwise=False)(x)
    assert q.rowwise[1].item() == 1.0


@pytest.mark.parametrize("columnwise, rowwise", ((True, False), (False, True), (True, True)))
def test_the_quantized_bits_are_the_oracles_for_hard_numbers(columnwise, rowwise) -> None:
    torch.manual_seed(0)
    hard = torch.cat(
        [
            torch.randn(500) * torch.exp2(torch.randint(-30, 10, (500,)).float()),
            (E4M3_VALUES[1:120] + E4M3_VALUES[2:121]) / 2,  # ties
            torch.tensor([0.0, -0.0, 448.0, 449.0, 463.9, 464.0, 465.0, 1e30, -1e30, 2**-9, 2**-10, 1.5 * 2**-10]),
        ]
    )
    x = hard[: len(hard) // 16 * 16].reshape(-1, 16)
    recipe = DelayedScaling()
    group = AmaxGroup(1, 1, torch.float8_e4m3fn, CPU)
    q = ReferenceBackend().quantizer(
        recipe, TensorRole.INPUT, group.slot(0), CPU, rowwise=rowwise, columnwise=columnwise
    )(x)
    expected = Scaling(E4M3, history_len=1)(x).float()
    assert (q.rowwise is None) == (not rowwise) and (q.columnwise is None) == (not columnwise)
    if rowwise:
        assert torch.equal(E4M3_VALUES[q.rowwise[0].long()], expected)
    if columnwise:
        assert torch.equal(E4M3_VALUES[q.columnwise[0].long()].t(), expected)


def test_a_step_that_sees_only_zeros_keeps_the_scale() -> None:
    recipe = DelayedScaling(amax_history_len=1)
    linear = nn.Linear(32, 32, bias=False)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe)
    oracle = oracle_linear(recipe)
    for x in (torch.ones(16, 32) * 3, torch.zeros(16, 32), torch.full((16, 32), 0.01)):
        y = compiled(x)
        expected = oracle(x, linear.weight.detach(), None)
        oracle.end_of_forward()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-7)
