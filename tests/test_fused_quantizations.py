"""Quantization in a fuser's kernels: the same bits as a kernel of its own gives, and what is no longer written."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from fused_model import WITHOUT, gated, given_special_numbers, inputs, jitted, trained
from steps import same
from thunder.core import dtypes
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import executor, fp8_state_dict, load_fp8_state_dict, te_ex
from thunder_te_exec.linear import Fp8Linear
from thunder_te_exec.passes import PASSES
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling, Format
from thunder_te_exec.symbols import is_te_backward, is_te_input_scale, is_te_linear, is_te_quantize
from torch import nn
from torch.utils.checkpoint import checkpoint
from traces import joint_trace


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.linear((x.reshape(2, 16, 4, 8) * 2).transpose(1, 2).reshape(2, 16, 32)).transpose(0, 1)


@pytest.mark.parametrize(
    "dtype, fp8",
    [(torch.bfloat16, Format.HYBRID), (torch.float16, Format.E4M3), (torch.float32, Format.HYBRID)],
    ids=("bfloat16", "float16", "float32"),
)
def test_bits_scales_and_histories_are_those_without_the_pass(dtype, fp8, monkeypatch) -> None:
    recipe = DelayedScaling(fp8_format=fp8, amax_history_len=4)
    fused = trained(jitted(gated(dtype), monkeypatch, recipe=recipe), dtype)
    assert same(fused, trained(jitted(gated(dtype), monkeypatch, WITHOUT, recipe), dtype))
    assert len({tuple(t.flatten().tolist()) for t in fused[:8:2]}) == 4


def test_special_numbers_are_quantized_as_without_the_pass(monkeypatch) -> None:
    fused = given_special_numbers(jitted(gated(), monkeypatch))
    assert same(fused, given_special_numbers(jitted(gated(), monkeypatch, WITHOUT)))


def test_a_tensor_that_only_fp8_linears_read_is_written_in_fp8_alone(monkeypatch) -> None:
    monkeypatch.setattr(executor, "PASSES", PASSES)
    _, after = joint_trace(gated(), inputs(0)[0], behind=[torch_compile_ex])
    linears = [b for b in after.bound_symbols if is_te_linear(b)]
    assert [b.args[0].dtype for b in linears] == [dtypes.uint8] * 3
    assert [b.kwargs["amax"].dtype for b in after.bound_symbols if is_te_quantize(b)] == [dtypes.float32] * 2
    # The last linear's gradient is 2 * g, those of the other two a product's: all are computed by the fuser.
    assert [b.args[5].dtype for b in after.bound_symbols if is_te_backward(b)] == [dtypes.uint8] * 3

    compiled = jitted(gated(), monkeypatch)
    compiled(inputs(0)[0])
    for trace in (thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]):
        operands = {b.args[0].name for b in trace.bound_symbols if is_te_linear(b)}
        operands |= {b.args[5].name for b in trace.bound_symbols if is_te_backward(b)}
        fusions = [b for b in trace.bound_symbols if b.sym.is_fusion]
        assert operands <= {out.name for b in fusions for out in b.flat_proxy_outs}
        inner = {out.name for b in fusions for sub in b.subsymbols for out in sub.flat_proxy_outs}
        assert not inner & {p.name for b in trace.bound_symbols if not b.sym.is_fusion for p in b.flat_proxy_args} - {
            out.name for b in fusions for out in b.flat_proxy_outs
        }


def fused_in(module: nn.Module, behind=(torch_compile_ex,), **options) -> int:
    _, after = joint_trace(module, inputs(0)[0], behind=list(behind), **options)
    backward = sum(is_te_backward(b) and "amax" in b.kwargs for b in after.bound_symbols)
    return backward + sum(map(is_te_input_scale, after.bound_symbols))


def test_nothing_is_fused_where_it_would_not_gain() -> None:
    assert fused_in(gated()) == 5
    assert fused_in(gated(), behind=()) == 0  # torch runs each operation by itself
    assert fused_in(gated(), te_fp8_recipe=Float8CurrentScaling()) == 0  # scales come from the tensors
    assert fused_in(gated().requires_grad_(True)) == 0  # weight gradients read transposed copies
    assert fused_in(nn.Linear(32, 32).bfloat16().requires_grad_(False)) == 0  # the caller's tensors
    assert fused_in(Transposed().bfloat16().requires_grad_(False)) == 0  # it takes longer


def test_a_second_backward_gives_the_same_gradients_and_moves_no_scale(monkeypatch) -> None:
    compiled = jitted(gated(), monkeypatch)
    trained(compiled)
    x, g = inputs(1)
    y = compiled(x)
    first = torch.autograd.grad(y, x, g, retain_graph=True)
    state = {k: t.clone() for k, t in fp8_state_dict(compiled).items()}
    assert same(torch.autograd.grad(y, x, g), first)
    assert same(list(fp8_state_dict(compiled).values()), list(state.values()))


def test_under_a_checkpoint_around_the_function_bits_are_those_of_one_without(monkeypatch) -> None:
    plain, checkpointed = (jitted(gated(), monkeypatch) for _ in range(2))

    class Checkpointed:
        def __call__(self, x):
            return checkpoint(checkpointed, x, use_reentrant=False)

    def run(function, compiled):
        found = []
        for step in range(3):
            x, g = inputs(step)
            y = function(x)
            y.backward(g)
            found += [y.detach(), x.grad]
        return [*found, *fp8_state_dict(compiled).values()]

    assert same(run(Checkpointed(), checkpointed), run(plain, plain))


class GivesAForwardTensorAsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, u):
        ctx.save_for_backward(u)
        return y + u

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0], g * 0


class WithForwardTensorAsGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = torch.cat([x[:1], x[1:]], 0)
        return GivesAForwardTensorAsGradient.apply(self.linear(x * 2), u) * u


def test_a_gradient_that_was_computed_in_forward_is_quantized_by_its_linear(monkeypatch) -> None:
    def run(passes):
        torch.manual_seed(0)
        compiled = jitted(WithForwardTensorAsGradient().requires_grad_(False).bfloat16(), monkeypatch, passes)
        return trained(compiled, steps=2)

    assert same(run(PASSES), run(WITHOUT))


@pytest.mark.parametrize("where", ("_forward", "backward"))
def test_what_an_exception_cut_short_is_in_the_state_and_not_in_one_that_is_loaded(where, monkeypatch) -> None:
    def run(passes):
        compiled = jitted(gated(), monkeypatch, passes)
        trained(compiled, steps=1)
        saved = {k: t.clone() for k, t in fp8_state_dict(compiled).items()}
        calls = []

        def third_raises(self, *args, original=getattr(Fp8Linear, where), **kwargs):
            calls.append(self)
            if len(calls) == 3:
                raise RuntimeError("no memory")
            return original(self, *args, **kwargs)

        x, g = inputs(6)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):
            patched.setattr(Fp8Linear, where, third_raises)
            compiled(x).backward(g)
        after = [t.clone() for t in fp8_state_dict(compiled).values()]
        load_fp8_state_dict(compiled, saved)
        return [*after, *trained(compiled, steps=2)]

    assert same(run(PASSES), run(WITHOUT))


def test_a_fuser_that_orders_symbols_by_their_data_gives_the_same_bits(monkeypatch) -> None:
    def run(**options):
        monkeypatch.setattr(executor, "PASSES", PASSES)
        recipe = DelayedScaling(amax_history_len=4)
        compiled = thunder.jit(gated(), executors=[te_ex, torch_compile_ex], te_fp8_recipe=recipe, **options)
        first, second = (inputs(n) for n in (1, 2))
        both = [compiled(x) for x, _ in (first, second)]  # two forwards before their backwards
        for y, (_, g) in zip(both, (first, second)):
            y.backward(g)
        return [first[0].grad, second[0].grad, *trained(compiled)]

    assert same(run(fusion_type="dataflow"), run())


def test_amaxes_of_a_forward_without_gradients_count_when_scales_move_next(monkeypatch) -> None:
    def run(passes):
        compiled = jitted(gated(), monkeypatch, passes)
        x, g = inputs(3)
        with torch.no_grad():
            compiled(x)
            compiled(x)
        return trained(compiled, steps=2)

    assert same(run(PASSES), run(WITHOUT))


def test_scales_that_are_loaded_are_those_that_are_used(monkeypatch) -> None:
    donor = jitted(gated(), monkeypatch)
    trained(donor)
    state = {k: t.clone() for k, t in fp8_state_dict(donor).items()}
    fresh = jitted(gated(), monkeypatch)
    load_fp8_state_dict(fresh, state)  # before its first call
    used = jitted(gated(), monkeypatch)
    trained(used, steps=1)
    load_fp8_state_dict(used, state)
    expected = trained(donor)[:8]
    assert same(trained(fresh)[:8], expected)
    assert same(trained(used)[:8], expected)
