"""A pipeline's rank: chunks of layers, run by a schedule, with jitted layers or with graphs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from thunder_te_exec import DelayedWgrad, fp8_state_dict, make_graphed_callables, te_ex
from torch import nn

INTERLEAVED = [1, 1, 2, 2, -2, 1, -2, 1, -1, 2, -1, 2, -2, -2, -1, -1]
GPIPE = [1, 1, 1, 1, 2, 2, 2, 2, -2, -2, -2, -2, -1, -1, -1, -1]


def delayed(order: Sequence[float]) -> list[float]:
    """``order`` with the weight gradients of each backward right after it."""
    return [entry for c in order for entry in ((c,) if c > 0 else (c, c - 0.5))]


class Layer(nn.Module):
    """A frozen and a trained linear, and a norm."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.frozen, self.trained = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.trained(nn.functional.gelu(self.frozen(self.norm(x))))


class AllFrozen(Layer):
    def __init__(self, features: int = 64) -> None:
        super().__init__(features)
        self.requires_grad_(False)


@dataclass
class Rank:
    """Chunks with as many layers each, and what runs each (chunk, microbatch, layer)."""

    layers: list[nn.Module]
    jitted: list[nn.Module]
    chunks: int
    microbatches: int
    delays: bool
    graphed: tuple = ()
    wgrads: list[DelayedWgrad] = field(default_factory=list)

    @classmethod
    def of(cls, recipe, chunks: int, microbatches: int, per_chunk: int, **options) -> Rank:
        torch.manual_seed(0)
        layers = [(AllFrozen if i == 1 else Layer)() for i in range(chunks * per_chunk)]
        layers = [layer.to("cuda", torch.bfloat16) for layer in layers]
        jitted = [thunder.jit(layer, executors=[te_ex], te_fp8_recipe=recipe, **options) for layer in layers]
        delays = options.get("te_delay_wgrad", False)
        wgrads = [DelayedWgrad(j) for j in jitted] if delays else []
        return cls(layers, jitted, chunks, microbatches, delays, wgrads=wgrads)

    @property
    def per_chunk(self) -> int:
        return len(self.layers) // self.chunks

    def sample(self, n: int = 0) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(n)
        return torch.randn(32, 64, device="cuda", generator=generator).to(torch.bfloat16)

    def capture(self, order: Sequence[float] | None, **options) -> None:
        samples = tuple((self.sample().requires_grad_(),) for _ in range(len(self.layers) * self.microbatches))
        self.graphed = make_graphed_callables(
            tuple(self.jitted), samples, order=order, delay_wgrad=self.delays, **options
        )

    def layer(self, chunk: int, microbatch: int, layer: int) -> Callable:
        if not self.graphed:
            return self.jitted[chunk * self.per_chunk + layer]
        return self.graphed[(chunk * self.microbatches + microbatch) * self.per_chunk + layer]

    def backward_dw(self, chunk: int, microbatch: int) -> None:
        for i in reversed(range(self.per_chunk)):
            run = self.layer(chunk, microbatch, i) if self.graphed else self.wgrads[chunk * self.per_chunk + i]
            run.backward_dw()

    def run(self, order: Sequence[float], step: int) -> list[torch.Tensor]:
        """Outputs and input gradients of a step, in order; gradients are added to ``.grad``."""
        forwards, backwards, wgrads = Counter(), Counter(), Counter()
        inputs, outputs, found = {}, {}, []
        for entry in order:
            chunk = int(abs(entry)) - 1
            if entry > 0:
                microbatch = forwards[chunk]
                forwards[chunk] += 1
                x = h = self.sample(100 * step + 10 * chunk + microbatch).requires_grad_()
                for i in range(self.per_chunk):
                    h = self.layer(chunk, microbatch, i)(h)
                inputs[chunk, microbatch], outputs[chunk, microbatch] = x, h
                found.append(h.detach().clone())
            elif entry == int(entry):
                microbatch = backwards[chunk]
                backwards[chunk] += 1
                y = outputs.pop((chunk, microbatch))
                y.backward(self.sample(100 * step + 50 + 10 * chunk + microbatch))
                found.append(inputs.pop((chunk, microbatch)).grad.clone())
            else:
                self.backward_dw(chunk, wgrads[chunk])
                wgrads[chunk] += 1
        return found

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {f"{i}.{name}": p.grad for i, layer in enumerate(self.layers) for name, p in layer.named_parameters()}

    @torch.no_grad()
    def optimizer_step(self) -> None:
        for layer in self.layers:
            for p in layer.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
                    p.grad = None

    def state(self) -> list[torch.Tensor]:
        return [t for jitted in self.jitted for t in fp8_state_dict(jitted).values()]


def same_gradients(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> bool:
    return all((g is None) == (b[n] is None) and (g is None or torch.equal(g, b[n])) for n, g in a.items())
