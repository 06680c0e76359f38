"""A training step captured with torch.cuda.graph: replays give the bits of the steps that Python runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from programs import LoraMLP
from steps import same
from thunder.executors.torch_compile import torch_compile_ex
from thunder_te_exec import fp8_state_dict, quantize_frozen_, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from torch import nn

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}
EXECUTORS = {"unfused": [te_ex], "fused": [te_ex, torch_compile_ex]}
WARM_UP = 3


def frozen(recipe) -> nn.Module:
    return _module(lambda name: "lora" in name)


def frozen_in_fp8(recipe) -> nn.Module:
    module = frozen(recipe)
    quantize_frozen_(module, recipe)
    return module


def trained(recipe) -> nn.Module:
    return _module(lambda name: True)


def _module(trains: Callable[[str], bool]) -> nn.Module:
    torch.manual_seed(0)
    module = LoraMLP().to("cuda", torch.bfloat16)
    for name, p in module.named_parameters():
        p.requires_grad_(trains(name))
    return module


@dataclass
class Training:
    """A jitted module, its static input and output gradient, and steps of it with a simple optimizer."""

    module: nn.Module
    compiled: nn.Module
    x: torch.Tensor
    g: torch.Tensor

    @classmethod
    def of(cls, module: nn.Module, recipe, executors=(te_ex,), **options) -> Training:
        compiled = thunder.jit(module, executors=list(executors), te_fp8_recipe=recipe, **options)
        x, g = (torch.zeros(2, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return cls(module, compiled, x.requires_grad_(), g)

    def load(self, n: int) -> None:
        generator = torch.Generator("cuda").manual_seed(n)
        with torch.no_grad():
            for t in (self.x, self.g):
                t.copy_(torch.randn(t.shape, generator=generator, device="cuda") * 2.0 ** (n % 5 - 4))

    def run(self) -> torch.Tensor:
        """Forward and backward."""
        y = self.compiled(self.x)
        y.backward(self.g)
        return y.detach()

    def trained(self) -> list[torch.Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    @torch.no_grad()
    def optimizer_step(self) -> None:
        for p in self.trained():
            p.sub_(p.grad, alpha=0.001)

    def forget_gradients(self) -> None:
        for t in (self.x, *self.trained()):
            t.grad = None

    def found(self, y: torch.Tensor) -> list[torch.Tensor]:
        return [y.clone(), *(t.grad.clone() for t in (self.x, *self.trained()))]

    def warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for n in range(WARM_UP):
                self.load(n)
                self.run()
                self.optimizer_step()
                self.forget_gradients()
        torch.cuda.current_stream().wait_stream(side)


def captured(training: Training) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of a step, and its output."""
    training.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = training.run()
    return graph, y


@pytest.mark.parametrize("executors", EXECUTORS)
@pytest.mark.parametrize("make", (frozen, frozen_in_fp8, trained))
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_replays_give_the_bits_of_twenty_steps(recipe, make, executors) -> None:
    recipe = RECIPES[recipe]()
    replays_are_steps(*(Training.of(make(recipe), recipe, EXECUTORS[executors]) for _ in range(2)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_quantized_weight_follows_the_optimizer_in_replays_too(recipe) -> None:
    recipe = RECIPES[recipe]()
    replays_are_steps(*(Training.of(trained(recipe), recipe, te_weight_cache=True) for _ in range(2)))


def replays_are_steps(replayed: Training, stepped: Training) -> None:
    graph, y = captured(replayed)
    stepped.warm_up()
    for n in range(20):
        for training in (replayed, stepped):
            training.load(n)
        graph.replay()
        there = replayed.found(y)
        stepped.forget_gradients()
        here = stepped.found(stepped.run())
        assert all(t.isfinite().all() for t in here)
        assert same(there, here), f"step {n}"
        replayed.optimizer_step()
        stepped.optimizer_step()
    of_replayed, of_stepped = (fp8_state_dict(t.compiled) for t in (replayed, stepped))
    assert same(list(of_replayed.values()), list(of_stepped.values()))


def test_a_module_that_was_captured_runs_without_the_graph_too() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    replayed, stepped = (Training.of(frozen(recipe), recipe) for _ in range(2))
    graph, y = captured(replayed)
    stepped.warm_up()
    for n in range(8):
        for training in (replayed, stepped):
            training.load(n)
            training.optimizer_step() if n else None
        if n % 2:
            graph.replay()
            there = replayed.found(y)
        else:
            kept = [t.grad for t in (replayed.x, *replayed.trained())]
            replayed.forget_gradients()
            there = replayed.found(replayed.run())
            for t, grad in zip((replayed.x, *replayed.trained()), kept):
                grad.copy_(t.grad)  # for the optimizer
                t.grad = grad  # where the graph writes it
        stepped.forget_gradients()
        assert same(there, stepped.found(stepped.run())), f"step {n}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_reads_the_frozen_weights_that_it_was_captured_with(recipe) -> None:
    recipe = RECIPES[recipe]()
    training = Training.of(frozen(recipe), recipe)
    graph, y = captured(training)
    training.load(0)
    graph.replay()
    before = training.found(y)
    with torch.no_grad():
        for p in training.module.parameters():
            if not p.requires_grad:
                p.zero_()
    training.compiled(training.x)  # quantizes them anew, and lets go of what it kept
    scribbled = [torch.full((96, 64), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(100)]
    if isinstance(recipe, DelayedScaling):  # two steps have moved the scales
        graph.replay()
        assert all(t.isfinite().all() for t in training.found(y))
    else:
        graph.replay()
        assert same(before, training.found(y))
    del scribbled


def test_a_call_between_replays_that_step_the_optimizer_quantizes_the_weights_of_now() -> None:
    recipe = Float8CurrentScaling()
    training = Training.of(trained(recipe), recipe, te_weight_cache=True)
    training.warm_up()
    training.load(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.run()
        training.optimizer_step()
    for _ in range(3):
        graph.replay()
        with torch.no_grad():
            now = training.compiled(training.x)
            fresh = thunder.jit(training.module, executors=[te_ex], te_fp8_recipe=recipe)
            assert torch.equal(now, fresh(training.x))
