"""Which linears are claimed, which are not, and that each refusal has a reason that a user can read."""

from __future__ import annotations

import contextlib

import pytest
import thunder
import torch
from programs import LoraLinear
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import Claim, autocast, claims, is_thin, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling
from torch import nn
from traces import forward_linears, jitted


def only_claim(compiled) -> Claim:
    (claim,) = claims(compiled)
    return claim


@pytest.mark.parametrize(
    "rows, in_features, out_features, reason",
    [
        (16, 32, 48, ""),
        (24, 32, 32, "24 input rows: FP8 GEMMs need a multiple of 16"),
        (16, 40, 32, "40 in_features: FP8 GEMMs need a multiple of 16"),
        (16, 32, 40, "40 out_features: FP8 GEMMs need a multiple of 16"),
        (0, 32, 32, "0 input rows: FP8 GEMMs need a multiple of 16"),
    ],
)
def test_a_dimension_that_does_not_fit_runs_in_high_precision_with_its_reason(
    rows, in_features, out_features, reason
) -> None:
    linear = nn.Linear(in_features, out_features)
    x = torch.randn(rows, in_features, requires_grad=True)
    compiled = jitted(linear, x)
    claim = only_claim(compiled)
    assert (claim.claimed, claim.reason) == (not reason, reason)
    assert claim.weight == "weight" and claim.weight_shape == (out_features, in_features)
    if reason:
        assert torch.equal(compiled(x), linear(x))


@pytest.mark.parametrize("shape", [(32,), (16, 32), (4, 4, 32), (2, 2, 4, 32), (2, 2, 2, 2, 32)], ids=str)
def test_inputs_of_rank_1_to_5_run_and_those_of_16_rows_in_fp8(shape) -> None:
    linear = nn.Linear(32, 32)
    x = torch.randn(shape, requires_grad=True)
    compiled = jitted(linear, x)
    y = compiled(x)
    y.sum().backward()
    assert only_claim(compiled).claimed == (len(shape) > 1)
    assert y.shape == shape and x.grad.shape == shape and linear.weight.grad.shape == (32, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float64_stays_in_float64(dtype) -> None:
    compiled = jitted(nn.Linear(32, 32, dtype=dtype), torch.randn(16, 32, dtype=dtype))
    claim = only_claim(compiled)
    assert claim.claimed == (dtype is not torch.float64)
    assert claim.claimed or "float64" in claim.reason


@pytest.mark.parametrize(
    "out_features, in_features, thin",
    [(32, 32, False), (16, 16, True), (16, 4096, True), (4096, 16, True), (128, 2048, True), (128, 2032, False)],
)
def test_thin_linears_are_those_of_low_rank_adapters(out_features, in_features, thin) -> None:
    assert is_thin(out_features, in_features) is thin


def test_an_adapter_stays_in_high_precision_and_its_base_does_not() -> None:
    compiled = jitted(LoraLinear(features=64, rank=16), torch.randn(16, 64))
    reasons = {c.weight: c.reason for c in claims(compiled)}
    assert reasons["base.weight"] == ""
    assert reasons["lora_A.weight"].startswith("thin (16 x 64)")
    assert reasons["lora_B.weight"].startswith("thin (64 x 16)")


def test_te_filter_decides_instead_of_the_thin_rule_once_a_linear_by_its_full_name() -> None:
    seen = []

    def only_adapters(name: str, shape: tuple[int, ...]) -> bool:
        seen.append((name, shape))
        return "lora" in name

    module = nn.Sequential(LoraLinear(features=64, rank=16))
    x = torch.randn(16, 64, requires_grad=True)
    compiled = jitted(module, x, te_filter=only_adapters)
    assert {c.weight: c.claimed for c in claims(compiled)} == {
        "0.base.weight": False,
        "0.lora_A.weight": True,
        "0.lora_B.weight": True,
    }
    assert sorted(seen) == [("0.base.weight", (64, 64)), ("0.lora_A.weight", (16, 64)), ("0.lora_B.weight", (64, 16))]
    assert {c.reason for c in claims(compiled) if not c.claimed} == {"te_filter returned False"}


@pytest.mark.parametrize("name", ("te_recipe", "te_weights_cache", "te_recompute_activation"))
def test_a_misspelt_option_raises_by_its_name_with_those_that_there_are(name) -> None:
    with pytest.raises(TypeError, match=f"{name}=.*no such option; those of te_ex are te_fp8_recipe, te_backend"):
        jitted(nn.Linear(32, 32), torch.randn(16, 32), **{name: True})


def test_te_filter_cannot_claim_what_fp8_cannot_run() -> None:
    compiled = jitted(nn.Linear(32, 40), torch.randn(16, 32), te_filter=lambda name, shape: True)
    assert "multiple of 16" in only_claim(compiled).reason


def test_a_te_filter_that_raises_is_reported_with_the_linears_name_and_its_own_exception() -> None:
    def broken(name: str, shape: tuple[int, ...]) -> bool:
        raise KeyError("nothing here")

    with pytest.raises(RuntimeError, match=r"te_filter raised for 'weight' of shape \(32, 32\): KeyError") as e:
        jitted(nn.Linear(32, 32), torch.randn(16, 32), te_filter=broken)
    assert isinstance(e.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"te_filter": "lora"}, TypeError, "te_filter: expected a callable"),
        ({"te_backend": "cuda"}, ValueError, "te_backend='cuda': expected one of 'te', 'reference'"),
        (
            {"te_backend": "te"},
            RuntimeError,
            "te_backend='te' cannot run DelayedScaling on cpu: Transformer Engine runs on CUDA only",
        ),
    ],
)
def test_an_option_that_cannot_be_used_raises_by_its_name(options, error, match) -> None:
    with pytest.raises(error, match=match):
        jitted(nn.Linear(32, 32), torch.randn(16, 32), **options)
    with pytest.raises(error, match=match), autocast(enabled=False):
        jitted(nn.Linear(32, 32), torch.randn(16, 32), **options)


def test_linears_have_the_names_of_their_parameters_under_torch_autocast() -> None:
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    compiled = thunder.jit(module, executors=[te_ex])
    for grad in (True, False):
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            assert compiled(x).dtype is torch.bfloat16
        assert [b.sym.name for b in forward_linears(compiled)] == ["te_linear_0", "te_linear_1"]
    assert {c.weight for c in claims(compiled)} == {"0.weight", "1.weight"} and all(c.claimed for c in claims(compiled))


def test_linears_of_a_function_have_the_names_of_its_arguments() -> None:
    def f(x, weights):
        return torch.nn.functional.linear(x, weights["up"])

    compiled = jitted(f, torch.randn(16, 32), {"up": torch.randn(32, 32, requires_grad=True)})
    assert only_claim(compiled).claimed and only_claim(compiled).weight.endswith("up")


def test_nothing_is_claimed_inside_autocast_that_is_not_enabled() -> None:
    linear = nn.Linear(32, 32)
    x = torch.randn(16, 32)
    with autocast(enabled=False):
        compiled = jitted(linear, x)
        assert torch.equal(compiled(x), linear(x))
    assert "autocast(enabled=False)" in only_claim(compiled).reason


def test_parameters_that_thunder_would_mix_up_raise_before_anything_runs() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.a_b = nn.Module(), nn.Module()
            self.a.b_c, self.a_b.c = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.a.b_c(x) + self.a_b.c(x)

    with pytest.raises(ValueError, match=r"'a.b_c.weight' and 'a_b.c.weight' the same name"):
        jitted(Outer(), torch.randn(16, 32))


def test_one_parameter_under_two_names_that_collide_is_no_mix_up() -> None:
    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(32, 32)
            self.l_weight = self.l.weight

        def forward(self, x):
            return self.l(x)

    assert only_claim(jitted(Aliased(), torch.randn(16, 32))).claimed


def test_a_linear_in_a_users_backward_is_not_claimed() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            return nn.functional.linear(x, w)

        @staticmethod
        def backward(ctx, g):
            (w,) = ctx.saved_tensors
            return nn.functional.linear(g, w.t()), None

    x, w = torch.randn(16, 32, requires_grad=True), torch.randn(32, 32)
    compiled = thunder.jit(lambda x, w: Doubled.apply(x, w), executors=[te_ex])
    compiled(x, w).sum().backward()
    assert "te_linear" not in str(thunder.last_backward_traces(compiled)[-1])
    torch.testing.assert_close(x.grad, torch.ones(16, 32) @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_features, out_features", ((0, 16), (16, 0)))
def test_a_linear_without_features_is_not_claimed_whatever_the_filter_says(in_features, out_features) -> None:
    w = torch.zeros(out_features, in_features)
    compiled = jitted(nn.functional.linear, torch.zeros(16, in_features), w, te_filter=lambda name, shape: True)
    assert "need a multiple of 16" in only_claim(compiled).reason


def test_weights_of_different_modules_of_a_function_have_different_names() -> None:
    one, other = nn.Linear(32, 32), nn.Linear(32, 32)
    compiled = jitted(lambda x: one(x) + other(x), torch.randn(16, 32))
    assert len({c.weight for c in claims(compiled)}) == 2


def test_a_linear_that_another_executor_took_first_says_so() -> None:
    compiled = thunder.jit(nn.Linear(32, 32), executors=[torch_compile_ex, te_ex])
    compiled(torch.randn(16, 32))
    assert not only_claim(compiled).claimed and "put te_ex before it" in only_claim(compiled).reason


def test_each_claim_names_the_class_of_recipe_that_it_was_decided_under() -> None:
    compiled = thunder.jit(nn.Linear(32, 32), executors=[te_ex], te_fp8_recipe=Float8BlockScaling())
    for context in (contextlib.nullcontext(), autocast(recipe=DelayedScaling()), autocast(enabled=False)):
        with context:
            compiled(torch.randn(16, 32))
    assert [(c.recipe, c.claimed) for c in claims(compiled)] == [
        ("Float8BlockScaling", True),
        ("DelayedScaling", True),
        ("", False),
    ]


def test_claims_of_something_that_is_not_jitted_raises() -> None:
    with pytest.raises(TypeError, match="what thunder.jit or jit_blocks returned"):
        claims(nn.Linear(32, 32))


def test_two_jitted_functions_share_nothing() -> None:
    linear = nn.Linear(32, 32)
    one, other = jitted(linear, torch.randn(16, 32)), thunder.jit(linear, executors=[te_ex])
    assert claims(one) and not claims(other)
