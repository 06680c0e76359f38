"""CUDAGraphTransform: a jitted function whose traces run as graphs gives the bits of one whose traces Python runs."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
import torch.utils.checkpoint
from programs import Checkpointed, LoraMLP
from steps import same
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import CUDAGraphTransform, fp8_state_dict, quantize_frozen_, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from torch import nn

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}
EXECUTORS = {"unfused": [te_ex], "fused": [te_ex, torch_compile_ex]}


def lora() -> nn.Module:
    module = LoraMLP()
    for name, p in module.named_parameters():
        p.requires_grad_("lora" in name)
    return module


def two(make, recipe, executors=(te_ex,), quantize=False) -> list[tuple[nn.Module, nn.Module]]:
    """Modules with what they were jitted to, the first of them with graphs."""
    found = []
    for transforms in ([CUDAGraphTransform()], []):
        torch.manual_seed(0)
        module = make().to("cuda", torch.bfloat16)
        if quantize:
            quantize_frozen_(module, recipe)
        options = {"executors": list(executors), "te_fp8_recipe": recipe}
        found.append((module, thunder.jit(module, transforms=transforms, **options)))
    return found


def batch(n: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(n)
    return (torch.randn(shape, generator=generator, device="cuda") * 2.0 ** (n % 5 - 4)).to(torch.bfloat16)


def step(module: nn.Module, function: nn.Module, n: int, *shape: int) -> list[torch.Tensor]:
    x = batch(n, *shape).requires_grad_()
    y = function(x)
    y.backward(batch(n + 1000, *shape))
    found = [y.detach().clone(), x.grad]
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                found.append(p.grad)
                p.sub_(p.grad, alpha=0.001)
                p.grad = None
    return found


def steps_are_the_same(pairs, steps: int, *shape: int) -> None:
    for n in range(steps):
        found = [step(module, function, n, *shape) for module, function in pairs]
        assert same(*found), f"step {n}"
        assert all(t.isfinite().all() for t in found[0])
    states = [list(fp8_state_dict(function).values()) for _, function in pairs]
    assert same(*states)


@pytest.mark.parametrize("executors", EXECUTORS)
@pytest.mark.parametrize("make", (lora, LoraMLP))
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_steps_have_the_same_bits(recipe, make, executors) -> None:
    steps_are_the_same(two(make, RECIPES[recipe](), EXECUTORS[executors]), 20, 2, 16, 64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_are_held_in_fp8_give_the_same_bits(recipe) -> None:
    steps_are_the_same(two(lora, RECIPES[recipe](), quantize=True), 8, 2, 16, 64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_that_backward_runs_again_gives_the_same_bits(recipe) -> None:
    pairs = two(Checkpointed, RECIPES[recipe]())
    steps_are_the_same(pairs, 10, 32, 32)
    names = {b.sym.name for b in thunder.last_backward_traces(pairs[0][1])[-1].bound_symbols}
    assert not any(name.startswith("te_recompute") for name in names)  # it is in the graph


def graphed(recipe=None) -> nn.Module:
    """A function that has run so often that it is replayed."""
    ((module, function), _) = two(LoraMLP, recipe or DelayedScaling(amax_history_len=4))
    for n in range(5):
        step(module, function, n, 2, 16, 64)
    return function


def test_a_second_backward_of_a_call_gives_the_same_gradients_and_moves_nothing() -> None:
    function = graphed()
    x = batch(0, 2, 16, 64).requires_grad_()
    y = function(x)
    (first,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    before = fp8_state_dict(function)
    (second,) = torch.autograd.grad(y, x, torch.ones_like(y))
    after = fp8_state_dict(function)
    assert torch.equal(first, second) and all(torch.equal(before[name], after[name]) for name in before)


def test_backward_of_a_call_that_another_one_overwrote_is_refused() -> None:
    function = graphed()
    x = batch(0, 2, 16, 64).requires_grad_()
    y = function(x)
    function(x).sum().backward()
    with pytest.raises(RuntimeError, match="the function was called again"):
        y.sum().backward()


def test_evaluation_and_other_shapes_have_graphs_of_their_own() -> None:
    pairs = two(LoraMLP, Float8CurrentScaling())
    for n in range(6):
        found = []
        for module, function in pairs:
            with torch.no_grad():
                out = [function(batch(n, rows, 16, 64)).clone() for rows in (1, 2)]
            found.append(out + step(module, function, n, 2, 16, 64) + step(module, function, n, 3, 16, 64))
        assert same(*found), f"step {n}"


@pytest.mark.parametrize("quantize", (False, True))
def test_graphs_are_captured_anew_when_a_frozen_weight_was_written_to_or_a_parameter_moved(quantize) -> None:
    pairs = two(lora, Float8CurrentScaling(), quantize=quantize)
    for n in range(20):
        for module, function in pairs:
            with torch.no_grad():
                if n == 5:
                    module.gate.base.weight.copy_(module.gate.base.weight * 0.5)
                if n == 10:
                    module.gate.lora_A.weight.data = module.gate.lora_A.weight.data * 0.5
                if n == 15:
                    half = nn.Parameter(module.gate.lora_A.weight * 0.5)
                    module.gate.lora_A.weight = half
                    function._overrides_parameters["gate.lora_A.weight"] = half
        assert same(*(step(module, function, n, 2, 16, 64) for module, function in pairs)), f"step {n}"


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_under_a_checkpoint_give_the_same_bits(recipe, reentrant) -> None:
    pairs = two(LoraMLP, RECIPES[recipe]())

    def checkpointed(function):
        def run(x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)
            return x

        return run

    for n in range(8):
        found = [step(module, checkpointed(function), n, 2, 16, 64) for module, function in pairs]
        assert same(*found), f"step {n}"


def test_more_backwards_of_a_call_than_calls_give_the_same_bits() -> None:
    pairs = two(LoraMLP, Float8CurrentScaling())
    for n in range(6):
        found = []
        for _, function in pairs:
            x = batch(n, 2, 16, 64).requires_grad_()
            y = function(x)
            for k in range(4):
                (grad,) = torch.autograd.grad(y, x, batch(n + k, 2, 16, 64), retain_graph=True)
                found.append(grad.clone())
        assert same(found[:4], found[4:]), f"step {n}"


@pytest.mark.parametrize(
    "reads", (lambda x: x, lambda x: x + 0, lambda x: x.view(2, 16, 64)), ids=("it", "sum", "view")
)
def test_gradients_of_an_input_accumulate(reads) -> None:
    pairs = two(LoraMLP, Float8CurrentScaling())
    xs = [batch(0, 2, 16, 64).requires_grad_() for _ in pairs]
    for n in range(8):
        for x, (_, function) in zip(xs, pairs):
            function(reads(x)).backward(batch(n, 2, 16, 64))
    assert torch.equal(*(x.grad for x in xs))


def test_outputs_are_copies_of_what_has_no_fp8_linear_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x * self.w)

    pairs = two(Scaled, Float8CurrentScaling())
    for n in range(8):
        found = []
        for _, function in pairs:
            with torch.no_grad():
                found.append([function(batch(n + k, 2, 16, 64)) for k in range(2)])
        assert same(*found), f"step {n}"
