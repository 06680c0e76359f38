"""Adapters that read one tensor are one product: which are, and that eager torch's numbers come out."""

from __future__ import annotations

import pytest
import thunder
import torch
from adapted_model import Adapted, adapted, gives_the_numbers_of_eager_torch, merged, whole_input
from programs import LoraMLP
from recipes import powers_of_two
from steps import same
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import executor, te_ex
from thunder_te_exec.passes import PASSES, merged_adapters
from torch import nn
from torch.utils.checkpoint import checkpoint
from traces import tensors_saved


@pytest.mark.parametrize("executors", ((), (torch_compile_ex,)), ids=("te_ex", "fuser"))
def test_adapters_of_other_ranks_are_merged(executors) -> None:
    module, x = adapted(8, 4, 1), whole_input()
    assert merged(module, x) == ([[8, 4, 1]], [[1, 4, 8]])
    gives_the_numbers_of_eager_torch(module, x, executors)


@pytest.mark.parametrize("tied, sizes", (((0, 2), [4, 4, 4]), ((1, 2), [4, 4])))
def test_an_adapter_that_two_linears_share_gets_both_gradients(tied, sizes) -> None:
    module, x = adapted(4, 4, 4), whole_input()
    module.A[tied[0]] = module.A[tied[1]]
    # The gradients of the second and the third are added before that of the first is there.
    assert merged(module, x) == ([[4, 4, 4]], [sizes])
    gives_the_numbers_of_eager_torch(module, x)


def test_one_adapter_of_a_tensor_is_left_alone() -> None:
    assert merged(adapted(4), whole_input()) == ([], [])


def test_a_frozen_adapter_is_merged_and_gets_no_gradient() -> None:
    module, x = adapted(8, 4, 2, frozen="A.1"), whole_input()
    # Its part is in what the input's gradient concatenates.
    assert merged(module, x) == ([[8, 4, 2]], [[2, 4, 8]])
    gives_the_numbers_of_eager_torch(module, x)
    assert module.A[1].weight.grad is None


def test_without_a_gradient_of_the_input_the_weights_gradients_are_one_product() -> None:
    for module, sizes in ((adapted(8, 4, 2), [2, 4, 8]), (adapted(8, 4, 2, frozen="A.1"), [2, 8])):
        x = whole_input(requires_grad=False)
        assert merged(module, x) == ([[8, 4, 2]], [sizes])
        gives_the_numbers_of_eager_torch(module, x)


def test_an_adapter_without_gradients_is_merged_in_forward_alone() -> None:
    def low(self, i, x):
        if i != 1:
            return self.A[i](x)
        with torch.no_grad():
            return self.A[i](x)

    module, x = adapted(8, 4, 2, low=low), whole_input()
    forward, backward = merged(module, x)
    assert backward == [[2, 8]] and sorted(sum(forward, [])) in ([2, 8], [2, 4, 8])
    gives_the_numbers_of_eager_torch(module, x)


def test_forward_without_gradients_is_merged() -> None:
    module, x = adapted(8, 4, 2), whole_input(requires_grad=False)
    with torch.no_grad():
        assert merged(module, x) == ([[8, 4, 2]], [])
        assert torch.equal(thunder.jit(module, executors=[te_ex], te_fp8_recipe=powers_of_two())(x), module(x))


def test_behind_dropout_adapters_read_tensors_of_their_own() -> None:
    def low(self, i, x):
        return self.A[i](nn.functional.dropout(x, 0.5))

    assert merged(adapted(8, 4, 2, low=low), whole_input()) == ([], [])


def test_a_weight_that_is_computed_later_is_not_merged_and_one_that_is_computed_before_is() -> None:
    class Computed(Adapted):
        def forward(self, x):
            before = self.A[1].weight * 2.0
            y = self.base[0](x) + self.B[0](self.A[0](x)) + self.B[1](nn.functional.linear(x, before))
            late = self.A[2].weight + y[0, :4] * 0.0
            return y + self.B[2](nn.functional.linear(x, late))

    module, x = Computed(4, 4, 4), whole_input()
    assert merged(module, x)[0] == [[4, 4]]
    gives_the_numbers_of_eager_torch(module, x)


def test_a_returned_result_of_an_adapter_has_memory_of_its_own() -> None:
    class Returned(Adapted):
        def forward(self, x):
            a, b, c = (A(x) for A in self.A)
            y = self.base[0](x) + self.B[0](a) + self.B[1](b) + self.B[2](c)
            return y, b.reshape(-1)

    module, x = Returned(8, 4, 2), whole_input()
    assert merged(module, x)[0] == [[8, 2]]
    y, b = thunder.jit(module, executors=[te_ex], te_fp8_recipe=powers_of_two())(x)
    assert b.untyped_storage().nbytes() == b.nbytes


def test_what_an_fp8_gemm_accumulates_into_or_quantizes_has_memory_of_its_own() -> None:
    class Thin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fp8 = nn.ModuleList(nn.Linear(128, 16, bias=False) for _ in range(2))
            self.A = nn.ModuleList(nn.Linear(128, 16, bias=False) for _ in range(4))
            self.fp8_too = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))

        def forward(self, x):
            into = [fp8(x) + A(x) for fp8, A in zip(self.fp8, self.A)]
            return *into, *(fp8(A(x)) for fp8, A in zip(self.fp8_too, list(self.A)[2:]))

    torch.manual_seed(0)
    module, x = Thin(), torch.randint(-2, 3, (64, 128)).float()
    for parameter in module.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape).float()
    module.requires_grad_(False)
    options = {"te_filter": lambda name, shape: "fp8" in name}
    assert merged(module, x, **options) == ([], [])
    ours = thunder.jit(module, executors=[te_ex], te_fp8_recipe=powers_of_two(), **options)(x)
    assert same(ours[:2], module(x)[:2])


def test_few_rows_are_not_worth_a_concatenation() -> None:
    # Two adapters: 2 * (8 + 8) features are read and written once more, and 16 rows are read once less.
    module = adapted(8, 8)
    assert merged(module, whole_input(rows=16))[0] == []
    assert merged(module, whole_input(rows=32))[0] == [[8, 8]]


def test_wide_linears_in_high_precision_are_not_merged() -> None:
    module, x = adapted(16, 16), whole_input()  # an eighth of 64 features is 8
    assert merged(module, x) == ([], [])


def test_adapters_in_float32_that_cast_their_inputs_are_left_alone() -> None:
    def low(self, i, x):
        return self.A[i](x.float()).to(x.dtype)

    module = adapted(8, 4, low=low).bfloat16()
    module.A.float()
    assert merged(module, whole_input(requires_grad=False).bfloat16()) == ([], [])


def test_gradients_of_merged_adapters_do_not_overlap() -> None:
    module, x = adapted(8, 4, 2), whole_input()
    thunder.jit(module, executors=[te_ex], te_fp8_recipe=powers_of_two())(x).sum().backward()
    kept = [A.weight.grad.clone() for A in module.A]
    for i, A in enumerate(module.A):
        assert A.weight.grad.is_contiguous()
        A.weight.grad.fill_(7.0)
        assert same([other.weight.grad for other in list(module.A)[i + 1 :]], kept[i + 1 :])


def test_a_checkpointed_region_is_merged_in_both_of_its_runs() -> None:
    class Region(Adapted):
        def forward(self, x):
            return checkpoint(super().forward, torch.relu(x), use_reentrant=False)

    module, x = Region(8, 4, 2), whole_input()
    forward, backward = merged(module, x)
    # The second run stands in backward, which goes from last to first.
    assert forward == [[8, 4, 2]] and backward == [[2, 4, 8]] * 2
    gives_the_numbers_of_eager_torch(module, x)


@pytest.mark.parametrize("executors", ((), (torch_compile_ex,)), ids=("te_ex", "fuser"))
def test_no_more_memory_is_saved_than_without_the_pass(executors, monkeypatch) -> None:
    saved = []
    for passes in (PASSES, tuple(p for p in PASSES if p is not merged_adapters)):
        monkeypatch.setattr(executor, "PASSES", passes)
        module = LoraMLP().bfloat16()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora" in name)
        x = torch.randn(64, 64).bfloat16().requires_grad_()
        y = thunder.jit(module, executors=[te_ex, *executors])(x)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_saved(y)}
        saved.append(sum(storages.values()))
    assert saved[0] <= saved[1]


class SummedLow(nn.Module):
    """Adapters of two inputs whose low-rank results are added: both inputs' gradients are of one pair."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(2))
        self.low = nn.ModuleList(nn.Linear(256, 16, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(16, 256, bias=False) for _ in range(2))
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).float()
        self.w.requires_grad_(False)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y = self.w[0](x) + self.w[1](z)
        first, second = self.low[0](x) + self.low[1](z), self.low[2](x) + self.low[3](z)
        return y + self.up[0](first) + self.up[1](second)


def test_two_groups_of_one_concatenation_are_both_merged() -> None:
    module = SummedLow()
    x, z = (torch.randint(-1, 2, (32, 256), generator=torch.Generator().manual_seed(i)).float() for i in (1, 2))
    found = []
    for run in (module, thunder.jit(module, executors=[te_ex], te_fp8_recipe=powers_of_two())):
        module.zero_grad()
        a, b = x.clone().requires_grad_(), z.clone().requires_grad_()
        run(a, b).backward(torch.ones(32, 256))
        found.append([p.grad.clone() for p in module.low.parameters()])
    assert same(*found)


def test_products_that_the_program_itself_returns_keep_memory_of_their_own() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.w(x), p.T @ x, q.T @ x

    module = Module()
    x, p, q = torch.randn(512, 64), torch.randn(512, 4), torch.randn(512, 4)
    _, first, second = thunder.jit(module, executors=[te_ex])(x, p, q)
    first.add_(1.0)
    torch.testing.assert_close(second, q.T @ x)
    with torch.no_grad():
        _, first, second = thunder.jit(module, executors=[te_ex])(x, p, q)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
