"""A training step captured in a CUDA graph: FP8 state moves inside of the graph, as it does without one."""

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

pytestmark = pytest.mark.gpu

WARM_UP, STEPS = 3, 20


@dataclass
class Training:
    """Steps of plain gradient descent on tensors that stay where they are."""

    module: nn.Module
    compiled: Callable

    def __post_init__(self) -> None:
        self.x = torch.zeros(2, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.g = torch.zeros_like(self.x)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]

    def load(self, n: int) -> None:
        generator = torch.Generator("cuda").manual_seed(n)
        with torch.no_grad():
            self.x.normal_(generator=generator).mul_(1.5 ** (n % 7))
            self.g.normal_(generator=generator)

    def forget_gradients(self) -> None:
        for p in (self.x, *self.parameters):
            p.grad = None

    def forward_and_backward(self) -> torch.Tensor:
        y = self.compiled(self.x)
        y.backward(self.g)
        return y.detach()

    def descend(self) -> None:
        with torch.no_grad():
            for p in self.parameters:
                p.sub_(p.grad, alpha=0.01)

    def results(self, y: torch.Tensor) -> list[torch.Tensor]:
        return [t.clone() for t in (y, self.x.grad, *(p.grad for p in self.parameters))]

    def step(self, n: int) -> list[torch.Tensor]:
        self.load(n)
        self.forget_gradients()
        y = self.forward_and_backward()
        self.descend()
        return self.results(y)


def training(recipe, behind, *, full: bool, fp8_weights: bool) -> Training:
    torch.manual_seed(0)
    module = LoraMLP().bfloat16().cuda()
    for name, p in module.named_parameters():
        p.requires_grad_(full or "lora" in name)
    if fp8_weights:
        quantize_frozen_(module, recipe)
    return Training(module, thunder.jit(module, executors=[te_ex, *behind], te_fp8_recipe=recipe))


RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling, "blocks": Float8BlockScaling}


@pytest.mark.parametrize("behind", ((), (torch_compile_ex,)), ids=("torch", "torch_compile"))
@pytest.mark.parametrize("weights", ("frozen", "frozen_in_fp8", "trained"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_replayed_from_a_graph_give_the_bits_of_steps_that_are_not(recipe, weights, behind) -> None:
    def make() -> Training:
        how = {"full": weights == "trained", "fp8_weights": weights == "frozen_in_fp8"}
        return training(RECIPES[recipe](), behind, **how)

    eager, graphed = make(), make()
    expected = [eager.step(n) for n in range(WARM_UP + STEPS)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [graphed.step(n) for n in range(WARM_UP)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graphed.forget_gradients()
    with torch.cuda.graph(graph):
        y = graphed.forward_and_backward()
    for n in range(WARM_UP, WARM_UP + STEPS):
        graphed.load(n)
        graph.replay()
        graphed.descend()
        found.append(graphed.results(y))
    assert [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if not same(a, b)] == []
    assert len({a[0].sum().item() for a in found}) == len(found)
    states = (fp8_state_dict(t.compiled) for t in (graphed, eager))
    assert same(*(list(state.values()) for state in states))
