"""What the CPU tests show of state and repeated runs, with Transformer Engine's kernels."""

from __future__ import annotations

import pytest
import steps
import thunder
import torch
from hf_llama import TARGETS, llama, losses
from programs import Checkpointed
from resumed_run import whole_and_resumed
from steps import same, step, under_thunderfx
from te_modules import te_linear
from thunder_te_exec import autocast, claims, fp8_state_dict, load_fp8_state_dict, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from torch import nn
from traces import backward_linears, flags

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}


def module(checkpoint: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(checkpoint).to("cuda", torch.bfloat16)


def compiled(fn: nn.Module, recipe: str, **options):
    return thunder.jit(fn, executors=[te_ex], te_fp8_recipe=RECIPES[recipe](), **options)


def batch(step: int) -> torch.Tensor:
    return steps.batch(step).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_changes_no_bit_of_four_steps(recipe) -> None:
    functions = [(compiled(fn, recipe), fn) for fn in (module(False), module(True))]
    for n in range(4):
        assert same(*(step(function, fn, batch(n)) for function, fn in functions)), f"step {n}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointing_under_thunderfx_changes_no_bit(recipe) -> None:
    plain, _ = under_thunderfx(module(False), RECIPES[recipe]())
    checkpointed, recomputed = under_thunderfx(module(True), RECIPES[recipe]())
    assert same(plain, checkpointed)
    assert any(name.startswith("te_recompute_linear") for name in recomputed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_backward_gives_the_same_gradients_and_moves_nothing(recipe) -> None:
    fn = module(True)
    function, steady = compiled(fn, recipe), compiled(fn, recipe)
    leaves = list(fn.parameters())
    for n in range(3):
        y = function(batch(n))
        g = torch.full_like(y, 5.0**n)
        first = torch.autograd.grad(y, leaves, g, retain_graph=True)
        assert same(first, torch.autograd.grad(y, leaves, g))
        assert same(first, torch.autograd.grad(steady(batch(n)), leaves, g))


@pytest.mark.parametrize("called_before", (False, True))
def test_a_loaded_function_goes_on_with_the_same_bits(called_before) -> None:
    one, other = module(), module()
    function, loaded = compiled(one, "delayed"), compiled(other, "delayed")
    for n in range(3):
        step(function, one, batch(n))
    if called_before:
        step(loaded, other, batch(9))
    load_fp8_state_dict(loaded, fp8_state_dict(function))
    for n in range(3, 6):
        assert same(step(function, one, batch(n)), step(loaded, other, batch(n)))
    a, b = fp8_state_dict(function), fp8_state_dict(loaded)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_weight_cache_gives_the_bits_of_no_cache_under_current_scaling_and_steps_under_delayed(recipe) -> None:
    fns = [module(), module()]
    functions = [compiled(fns[0], recipe, te_weight_cache=True), compiled(fns[1], recipe)]
    steppers = [torch.optim.SGD(fn.parameters(), lr=0.01) for fn in fns]
    for n in range(3):
        found = []
        for function, fn, stepper in zip(functions, fns, steppers):
            for microbatch in range(3):
                found.append(function(batch(microbatch)).detach())
                function(batch(microbatch)).sum().backward()
            stepper.step()
            stepper.zero_grad()
        half = len(found) // 2
        if recipe != "delayed":
            assert same(found[:half], found[half:])
        assert all(y.isfinite().all() for y in found)


class TECheckpointed(nn.Module):
    """``Checkpointed`` of ``te.Linear``, its region under ``te.checkpoint``."""

    def __init__(self, ours: Checkpointed) -> None:
        super().__init__()
        self.first, self.last = te_linear(ours.first), te_linear(ours.last)
        self.region = nn.Sequential(*(te_linear(m) if isinstance(m, nn.Linear) else nn.ReLU() for m in ours.region))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        return self.last(te.checkpoint(self.region, self.first(x), use_reentrant=False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpointed_training_gives_the_bits_of_te_checkpoint_over_five_steps(recipe) -> None:
    import transformer_engine.pytorch as te

    ours = module(True)
    theirs = TECheckpointed(ours)
    function = thunder.jit(ours, executors=[te_ex])
    steppers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (ours, theirs)]
    for n in range(5):
        with te.autocast(recipe=RECIPES[recipe]()):
            y, expected = function(batch(n % 3)), theirs(batch(n % 3))
        assert torch.equal(y, expected), f"step {n}"
        y.float().mean().backward()
        expected.float().mean().backward()
        assert same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()]), f"step {n}"
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_calls_before_a_backward_give_te_linears_bits(recipe) -> None:
    import transformer_engine.pytorch as te

    linear = nn.Linear(64, 64).to("cuda", torch.bfloat16)
    theirs = te_linear(linear)
    function = thunder.jit(linear, executors=[te_ex])
    for n in range(4):
        outputs = []
        for x in (batch(n).repeat(1, 2), batch(n + 1).repeat(1, 2)):
            with te.autocast(recipe=RECIPES[recipe]()):
                outputs.append((function(x), theirs(x)))
        for ours, expected in outputs:
            assert torch.equal(ours, expected), f"step {n}"
        for which, fn in enumerate((linear, theirs)):
            fn.zero_grad()
            (outputs[0][which] * outputs[1][which]).sum().backward()
        assert same([p.grad for p in linear.parameters()], [p.grad for p in theirs.parameters()]), f"step {n}"


def test_a_step_has_one_fused_scale_update_a_direction(monkeypatch) -> None:
    import transformer_engine_torch as tex

    fn = module(True)
    function = compiled(fn, "delayed")
    step(function, fn, batch(0))
    calls = []
    original = tex.fused_amax_and_scale_update_after_reduction
    monkeypatch.setattr(tex, "fused_amax_and_scale_update_after_reduction", lambda *a: (calls.append(a), original(*a)))
    step(function, fn, batch(1))
    # Input and weight of five linears, then their gradients; E4M3 and E5M2.
    assert [args[1][0].shape for args in calls] == [(4, 10), (4, 5)]


def test_a_run_that_is_stopped_and_resumed_in_a_new_process_has_the_losses_of_one_that_was_not(tmp_path) -> None:
    whole, parts = whole_and_resumed(tmp_path, "cuda")
    assert parts == whole and len(set(whole)) == 8


def test_a_gradient_of_a_gradient_raises_instead_of_being_missing() -> None:
    fn = module()
    function = compiled(fn, "delayed")
    with pytest.raises(RuntimeError, match="create_graph=True .* is differentiable once"):
        torch.autograd.grad(function(batch(0)).pow(2).sum(), list(fn.parameters()), create_graph=True)
    assert all(torch.isfinite(t).all() for t in step(function, fn, batch(1)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_llama_with_adapters_trains_under_thunderfx(recipe) -> None:
    from thunder.dynamo import thunderfx

    torch._dynamo.reset()
    model = llama().to("cuda", torch.bfloat16)
    function = thunderfx(model, executors=[te_ex], te_fp8_recipe=RECIPES[recipe]())
    ours = losses(function, model)
    model = llama().to("cuda", torch.bfloat16)
    eager = losses(model, model)
    # FP8 rounds each number by at most 2**-4 of it; the losses of a random model differ by far less.
    assert all(abs(a - b) < 2.0**-4 for a, b in zip(ours, eager)) and ours[-1] < ours[0]
    (training,) = (fn for info in function._backend.subgraph_infos for fn in info.thunder_compiled_fns if claims(fn))
    assert sum(c.claimed for c in claims(training)) == len(TARGETS) + 1  # and the head
    assert flags(backward_linears(training)) == [(True, False, False)] * (len(TARGETS) + 1 - 3)


def test_a_function_follows_the_context_as_te_linear_does() -> None:
    import transformer_engine.pytorch as te

    linear = nn.Linear(64, 64, bias=False).to("cuda", torch.bfloat16)
    theirs = te_linear(linear)
    function = thunder.jit(linear, executors=[te_ex])
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    for recipe, enabled in ((Float8CurrentScaling(), True), (None, False), (Float8CurrentScaling(), True)):
        with te.autocast(enabled=enabled, recipe=recipe):
            assert torch.equal(function(x), theirs(x))
        with autocast(enabled=enabled, recipe=recipe):
            assert torch.equal(function(x), theirs(x))


def test_a_first_call_in_inference_mode_leaves_a_function_that_trains() -> None:
    fn = module()
    function, fresh = compiled(fn, "delayed"), compiled(fn, "delayed")
    with torch.inference_mode():
        function(batch(0))
    for n in range(2):
        assert same(step(function, fn, batch(n)), step(fresh, fn, batch(n)))
