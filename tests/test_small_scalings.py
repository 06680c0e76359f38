"""Scaled adapters: what is multiplied, how often, and that eager torch's numbers come out."""

from __future__ import annotations

import pytest
import thunder
import torch
from adapted_model import adapted, gives_the_numbers_of_eager_torch, merged, whole_input
from recipes import powers_of_two
from thunder.core.symbol import BoundSymbolTag
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import te_ex
from thunder_te_exec.passes.patterns import scaled_by
from torch import nn
from traces import joint_trace

BY_ONE, BY_TWO = (lambda self, i, x: self.A[i](x) * 3.0), (lambda self, i, x: self.A[i](x) * (3.0, 5.0)[i % 2])


class ScaledOutputs(nn.Module):
    """``B(A(x)) * number`` of each adapter beside a frozen linear of the same tensor; every number is whole."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers, self.adapters = numbers, adapted(*(4 for _ in numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.adapters
        return sum(m.base[i](x) + m.B[i](m.A[i](x)) * number for i, number in enumerate(self.numbers))


def multiplications(module: nn.Module) -> tuple[list[int], list[int]]:
    """The sizes of what is multiplied by a number, in forward and in backward."""
    _, after = joint_trace(module, whole_input(), te_fp8_recipe=powers_of_two())
    found = [b for b in after.bound_symbols if scaled_by(b) is not None]
    backward = [BoundSymbolTag.BACKWARD in b.tags for b in found]
    return tuple([b.output.numel for b, late in zip(found, backward) if late is which] for which in (False, True))


@pytest.mark.parametrize("executors", ((), (torch_compile_ex,)), ids=("te_ex", "fuser"))
@pytest.mark.parametrize("numbers", ((3.0,), (3.0, 3.0), (3.0, 5.0), (3.0, 1.0)), ids=str)
def test_scaled_outputs_have_the_gradients_of_eager_torch(numbers, executors) -> None:
    gives_the_numbers_of_eager_torch(ScaledOutputs(*numbers), whole_input(), executors)


def test_the_gradient_of_a_second_matrix_reads_what_forward_has_multiplied() -> None:
    # 32 rows of rank 4: what the second matrices read, and the gradient of that. Their own gradients are 64 x 4.
    assert multiplications(ScaledOutputs(3.0)) == ([32 * 4], [32 * 4])


def test_results_of_one_product_are_multiplied_at_once_where_it_is_by_one_number() -> None:
    assert multiplications(ScaledOutputs(3.0, 3.0))[0] == [32 * 8]
    assert multiplications(ScaledOutputs(3.0, 5.0))[0] == [32 * 4] * 2
    assert multiplications(adapted(4, 2, low=BY_ONE))[0] == [32 * 6]
    assert multiplications(adapted(4, 2, low=BY_TWO))[0] == [32 * 4, 32 * 2]


@pytest.mark.parametrize("low", (BY_ONE, BY_TWO), ids=("one", "two"))
def test_adapters_whose_low_side_is_scaled_have_the_gradients_of_eager_torch(low) -> None:
    gives_the_numbers_of_eager_torch(adapted(4, 2, low=low), whole_input())


class ReturnsScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = adapted(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m = self.adapters
        a, b = (A(x) * 3.0 for A in m.A)
        return m.base[0](x) + m.B[0](a) + m.B[1](b), b


def test_a_multiplied_result_that_is_returned_has_memory_of_its_own() -> None:
    module, x = ReturnsScaled(), whole_input()
    assert merged(module, x)[0] == [[4, 2]]
    _, b = thunder.jit(module, executors=[te_ex], te_fp8_recipe=powers_of_two())(x)
    assert b.untyped_storage().nbytes() == b.nbytes


class ReadsUnscaledToo(nn.Module):
    """What the first matrix gives is read unscaled as well, and scaled by a second number."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = adapted(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.adapters
        a = m.A[0](x)
        return m.base[0](x) + m.B[0](a) * 3.0 + m.B[1](a) * 5.0 + m.base[1](x) + m.B[1](a)


def test_a_result_that_is_scaled_by_two_numbers_and_read_unscaled_has_the_gradients_of_eager_torch() -> None:
    gives_the_numbers_of_eager_torch(ReadsUnscaledToo(), whole_input())


class MadeMatrix(nn.Module):
    """The second matrix of an adapter is itself the result of a scaled product."""

    def __init__(self, make) -> None:
        super().__init__()
        self.adapters, self.make = adapted(4), make
        self.left, self.right = nn.Parameter(torch.ones(64, 2)), nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.adapters
        matrix = self.make(self.left, self.right)
        return m.base[0](x) + nn.functional.linear(m.A[0](x), matrix) * 3.0


@pytest.mark.parametrize(
    "make",
    (lambda l, r: (l * 2.0) @ r, lambda l, r: nn.functional.linear(l, r.t()) * 2.0),
    ids=("scaled factor", "scaled result"),
)
def test_a_second_matrix_that_is_scaled_itself_is_the_one_that_is_read(make) -> None:
    gives_the_numbers_of_eager_torch(MadeMatrix(make), whole_input())


def test_what_two_linears_read_is_multiplied_once() -> None:
    class TwoOfOne(ReadsUnscaledToo):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            m = self.adapters
            a = m.A[0](x)
            return m.base[0](x) + m.B[0](a) * 3.0 + m.B[1](a) * 3.0

    assert multiplications(TwoOfOne())[0] == [32 * 4]
    gives_the_numbers_of_eager_torch(TwoOfOne(), whole_input())


class InfinitiesOfTwoSigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = adapted(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        m = self.adapters
        return m.base[0](x), 1 / (m.A[0](x) * 0.0), 1 / (m.A[1](x) * -0.0)


def test_zeros_of_two_signs_are_two_numbers() -> None:
    module, x = InfinitiesOfTwoSigns(), whole_input()
    compiled = thunder.jit(module, executors=[te_ex, torch_compile_ex], te_fp8_recipe=powers_of_two())
    assert all(torch.equal(ours, eager) for ours, eager in zip(compiled(x), module(x)))
