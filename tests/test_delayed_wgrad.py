"""Delayed weight gradients: what the pass takes out of backward, and numbers, to the bit the ordinary backward's."""

from __future__ import annotations

import pytest
import thunder
import torch
from block_model import Model, tokens
from delayed_steps import Pair, batch, stack, without_gradient
from programs import (
    TRAINING,
    Checkpointed,
    SharedWeight,
    every_even_linear_frozen_with_bias,
    nothing_frozen,
    one_weight_in_two_linears,
)
from recipes import FLOAT8_BLOCKS, MICROSCALING, RECIPES
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import DelayedWgrad, fp8_state_dict, jit_blocks, te_ex
from thunder_te_exec.backends.reference import ReferenceBackend
from thunder_te_exec.executor import te_functional_linear_dgrad, te_functional_linear_wgrad
from thunder_te_exec.passes.delayed_wgrad import delayed_wgrad
from thunder_te_exec.recipe import DelayedScaling, NVFP4BlockScaling, TensorRole
from thunder_te_exec.symbols import is_te_backward
from torch import nn
from traces import as_text, jitted, joint_trace

ALL_RECIPES = RECIPES | FLOAT8_BLOCKS | MICROSCALING

# --- the pass ---------------------------------------------------------------------------------------------------------


def split(program, **options):
    """The joint trace of a program after all passes, what is left of it, and what waits."""
    _, trace = joint_trace(*program(), **options)
    parameters = {a.name: a.name for a in trace.args if a.name.startswith("t_")}
    symbols = te_functional_linear_dgrad, te_functional_linear_wgrad
    return trace, *delayed_wgrad(trace, parameters, {"t_linear_weight"}, *symbols)


@pytest.mark.parametrize("program", (every_even_linear_frozen_with_bias, one_weight_in_two_linears))
def test_the_pass_rewrites_its_program_as_its_golden_trace_shows(program, golden) -> None:
    before, after, parts = split(program)
    text = "\n# --- waits ---\n".join((as_text(before, after), as_text(*(part.trace for part in parts))))
    assert text == golden(name=f"pass_delayed_wgrad_{program.__name__}")


@pytest.mark.parametrize("program", (nothing_frozen, every_even_linear_frozen_with_bias), ids=lambda p: p.__name__)
def test_forward_backward_and_what_waits_are_the_golden_ones(program, golden) -> None:
    compiled = jitted(*program(), te_delay_wgrad=True)
    traces = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    text = as_text(*traces, *DelayedWgrad(compiled).traces())
    assert text == golden(name=f"delayed_wgrad_{program.__name__}")


@pytest.mark.parametrize("program", TRAINING, ids=lambda p: p.__name__)
def test_backward_returns_no_gradient_that_waits_and_every_other_one(program) -> None:
    before, after, parts = split(program)
    slots = zip(*(t.bound_symbols[-1].args[0]["output"] for t in (before, after)), before.args)
    waiting = {p for part in parts for p in part.parameters}
    for was, now, arg in slots:
        assert (now is None) if was is None or arg.name in waiting else (now.name == was.name)
    claimed = [b for b in before.bound_symbols if is_te_backward(b)]
    assert not any(b.output[1] is not None for b in after.bound_symbols if is_te_backward(b))
    assert bool(parts) == any(g is not None for b in claimed for g in b.output[1:])


def test_gradients_are_quantized_once_and_before_the_scales_move(monkeypatch) -> None:
    quantized = []
    make = ReferenceBackend.quantizer

    def quantizer(self, recipe, role, *args, **kwargs):
        quantize = make(self, recipe, role, *args, **kwargs)
        return lambda x: quantized.append(role) or quantize(x)

    monkeypatch.setattr(ReferenceBackend, "quantizer", quantizer)
    compiled = thunder.jit(stack(), executors=[te_ex], te_fp8_recipe=DelayedScaling(), te_delay_wgrad=True)
    compiled(batch(0)).sum().backward()
    assert quantized.count(TensorRole.GRAD_OUTPUT) == 3
    state = {name: t.clone() for name, t in fp8_state_dict(compiled).items()}
    quantized.clear()
    DelayedWgrad(compiled).backward_dw()
    assert not quantized and all(torch.equal(t, state[name]) for name, t in fp8_state_dict(compiled).items())


def test_what_waits_holds_no_tensor_in_high_precision_but_sums_for_biases() -> None:
    pair = Pair(stack(dtype=torch.bfloat16))
    pair.backward(batch(0, dtype=torch.bfloat16))
    (backward,) = pair.wgrads._queue._backwards
    tensors = [t for w in backward.waiting.values() for t in _flat(w.operands) if isinstance(t, torch.Tensor)]
    assert {(t.dtype, t.numel()) for t in tensors} == {
        (torch.uint8, 32 * 64),  # an input's or a gradient's column-wise copy
        (torch.float32, 1),
        (torch.bfloat16, 64),
    }


def _flat(operands):
    return [t for o in operands for t in (_flat(o) if type(o) is tuple else [o])]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(name, torch.bfloat16) for name in ALL_RECIPES] + [(name, torch.float32) for name in ("delayed", "blocks")],
)
def test_gradients_are_those_of_the_ordinary_backward_to_the_last_bit(recipe, dtype) -> None:
    pair = Pair(stack(dtype=dtype), te_fp8_recipe=ALL_RECIPES[recipe]())
    for n in range(4):
        pair.backward(batch(n, rows=32 if n % 2 else 64, dtype=dtype))  # two microbatches of two shapes outstanding
        assert len(without_gradient(pair.modules[1])) == (6 if n < 2 else 0)
        if n:
            pair.wgrads.backward_dw()
    assert pair.wgrads.need_backward_dw()
    pair.wgrads.backward_dw()
    assert not pair.wgrads.need_backward_dw()
    assert pair.gradients_are_the_same()
    states = [fp8_state_dict(function) for function in (pair.ordinary, pair.delayed)]
    assert states[0].keys() == states[1].keys() and all(torch.equal(t, states[1][n]) for n, t in states[0].items())


@pytest.mark.parametrize(
    "trained", ("0.weight", "0.bias", "2.weight 4.bias", "0.weight 2.bias 4.weight", "2.weight 2.bias", "")
)
@pytest.mark.parametrize("bias", (False, True), ids=("no-bias", "bias"))
def test_frozen_parameters_never_wait_and_the_others_get_the_ordinary_bits(trained, bias) -> None:
    module = stack(bias=bias)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained.split())
    pair = Pair(module, te_fp8_recipe=DelayedScaling(amax_history_len=2))
    for n in range(3):
        pair.backward(batch(n))
        expected = [p for p in pair.modules[1].parameters() if p.requires_grad]
        assert {id(p) for p in pair.wgrads.get_backward_dw_params()} == {id(p) for p in expected}
        pair.wgrads.backward_dw()
        assert pair.gradients_are_the_same()


def test_stochastic_rounding_draws_what_the_ordinary_backward_draws() -> None:
    pair = Pair(stack(dtype=torch.bfloat16), te_fp8_recipe=NVFP4BlockScaling())
    x = batch(0, dtype=torch.bfloat16)
    for function in (pair.ordinary, pair.delayed):
        torch.manual_seed(1)
        function(x).sum().backward()
    pair.wgrads.backward_dw()
    assert pair.gradients_are_the_same()


class Derived(nn.Module):
    """A weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight * self.scale)


class SumOfWeights(nn.Module):
    """Two weights that get one and the same gradient, and a third that gets a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n, 64)) for n in (64, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.a + self.b + self.c.t())


class TiedToAnEmbedding(nn.Module):
    """A head whose weight is the embedding's: a gradient of backward is part of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class TiedLinears(nn.Module):
    """Two modules of one weight, which thunder takes for two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


class ThreeUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.linear(torch.relu(self.linear(x)))))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("make", (Derived, SumOfWeights, TiedToAnEmbedding, TiedLinears, ThreeUses))
def test_what_depends_on_a_gradient_that_waits_waits_with_it(make, dtype) -> None:
    torch.manual_seed(0)
    pair = Pair(make().to(dtype))
    for n in range(3):
        x = torch.randint(0, 64, (32,)) if make is TiedToAnEmbedding else batch(n, dtype=dtype)
        pair.backward(x)
        assert n or without_gradient(pair.modules[1]) == [name for name, _ in pair.modules[1].named_parameters()]
        pair.wgrads.backward_dw()
        assert pair.gradients_are_the_same()
    assert len({p.grad.untyped_storage().data_ptr() for p in pair.modules[1].parameters()}) == len(
        list(pair.modules[1].parameters())
    )


class Hypernetwork(nn.Module):
    """A linear makes the weight of another: the gradient of that weight flows on through FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.linear(x, self.makes(x.sin())[:64].contiguous()))


class LowRank(nn.Module):
    """A weight with a low-rank part: its factors' gradients are products of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.b, self.a = (nn.Parameter(torch.randn(shape)) for shape in ((64, 64), (64, 8), (8, 64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight + self.b @ self.a)


def test_an_autocast_around_backward_dw_changes_nothing() -> None:
    torch.manual_seed(0)
    pair = Pair(LowRank())
    pair.backward(batch(0))
    assert len(without_gradient(pair.modules[1])) == 3
    with torch.autocast("cpu", torch.bfloat16):
        pair.wgrads.backward_dw()
        assert torch.is_autocast_enabled("cpu")
    assert pair.gradients_are_the_same()


class WeightsAsArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(nn.functional.linear(x, x))


@pytest.mark.parametrize(("make", "waits"), ((Hypernetwork, 4), (WeightsAsArguments, 2)))
def test_a_linear_stays_whole_where_its_gradient_ends_in_no_parameter(make, waits) -> None:
    torch.manual_seed(0)
    pair = Pair(make())
    for n in range(2):
        pair.backward(batch(n, rows=64))
        assert len(pair.wgrads.get_backward_dw_params()) == waits
        pair.wgrads.backward_dw()
        assert pair.gradients_are_the_same()


def test_a_weight_that_is_an_argument_of_a_function_gets_its_gradient_in_backward() -> None:
    x, w = batch(0).requires_grad_(), batch(1, rows=64).requires_grad_()
    compiled = thunder.jit(nn.functional.linear, executors=[te_ex], te_delay_wgrad=True)
    compiled(x, w).sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize("make", (Checkpointed, SharedWeight))
@pytest.mark.parametrize("executors", ([te_ex], [te_ex, torch_compile_ex]), ids=("alone", "fused"))
def test_numbers_hold_under_checkpointing_and_behind_a_fuser(make, executors) -> None:
    torch.manual_seed(0)
    pair = Pair(make(), executors=executors)
    for n in range(3):
        pair.backward(batch(n, features=32))
        pair.wgrads.backward_dw()
        assert pair.gradients_are_the_same()


@pytest.mark.parametrize("reentrant", (None, False, True), ids=("plain", "checkpoint", "reentrant"))
def test_numbers_hold_under_jit_blocks_whose_blocks_are_still_traced_once(reentrant) -> None:
    pair = Pair(Model(blocks=3, reentrant=reentrant), jit=jit_blocks)
    for n in range(3):
        pair.backward(tokens(n))
    while pair.wgrads.need_backward_dw():
        pair.wgrads.backward_dw()
    assert pair.gradients_are_the_same()
    # The blocks are one compilation, the head is another.
    assert [bool(state.wgrad_traces) for state in pair.wgrads._states].count(True) == 2
