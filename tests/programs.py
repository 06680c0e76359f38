"""The programs whose traces are pinned in traces_golden/: each a module and its input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import nn

Program = tuple[nn.Module, torch.Tensor]


def _input(requires_grad: bool, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (32, 32)), requires_grad=requires_grad)


def _freeze(module: nn.Module, keep: Callable[[str], bool]) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(keep(name))
    return module


def _stack(bias: bool, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32, bias=bias) for _ in range(layers)))


def every_even_linear_frozen() -> Program:
    return _freeze(_stack(bias=False), lambda name: name[0] in "13"), _input(True)


def every_even_linear_frozen_with_bias() -> Program:
    return _freeze(_stack(bias=True), lambda name: name[0] in "13"), _input(True)


def all_frozen_but_the_input() -> Program:
    return _freeze(_stack(bias=True, layers=2), lambda name: False), _input(True)


def first_linear_frozen_and_no_input_gradient() -> Program:
    return _freeze(_stack(bias=True, layers=2), lambda name: name[0] == "1"), _input(False)


def nothing_frozen() -> Program:
    return _stack(bias=True, layers=2), _input(True)


def only_the_last_bias_trained() -> Program:
    return _freeze(_stack(bias=True, layers=2), lambda name: name == "1.bias"), _input(False)


def only_biases_trained() -> Program:
    return _freeze(_stack(bias=True, layers=3), lambda name: name.endswith("bias")), _input(False)


class SharedWeight(nn.Module):
    """One weight read by two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.linear(x)))


def one_weight_in_two_linears() -> Program:
    return SharedWeight(), _input(True)


def one_frozen_weight_in_two_linears() -> Program:
    return _freeze(SharedWeight(), lambda name: False), _input(True)


class LoraLinear(nn.Module):
    """A frozen linear with a low-rank adapter."""

    def __init__(self, features: int = 64, rank: int = 8, out_features: int | None = None) -> None:
        super().__init__()
        out_features = out_features or features
        self.base = nn.Linear(features, out_features, bias=False)
        self.lora_A = nn.Linear(features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * 2.0


def lora_linear() -> Program:
    return _freeze(LoraLinear(), lambda name: "lora" in name), _input(True, 2, 16, 64)


class LoraMLP(nn.Module):
    """SwiGLU with an adapter on each linear, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (LoraLinear(64, 8, 96) for _ in range(2))
        self.down = LoraLinear(96, 8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def lora_mlp_in_bfloat16() -> Program:
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    return _freeze(LoraMLP(), lambda name: "lora" in name).bfloat16(), x


class DetachedBranch(nn.Module):
    """A linear whose output reaches the result without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(32, 32)
        self.detached = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(x) + self.detached(x).detach()


def a_linear_whose_output_is_detached() -> Program:
    return DetachedBranch(), _input(True)


class Checkpointed(nn.Module):
    """A region whose values are computed again in backward, with linears before and after it."""

    def __init__(self, checkpoint: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.region = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.checkpoint:
            x = torch.utils.checkpoint.checkpoint(self.region, x, use_reentrant=False)
        else:
            x = self.region(x)
        return self.last(x)


class DetachedInPlace(nn.Module):
    """A detached value that is written to in place: thunder gives it a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.detached = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.detached(x).detach()
        h.mul_(0.5)
        return self.trained(x) + h


def a_detached_value_written_to_in_place() -> Program:
    return DetachedInPlace(), _input(True)


def a_checkpointed_region() -> Program:
    return _freeze(Checkpointed(), lambda name: not name.startswith("region.0")), _input(True)


TRAINING: tuple[Callable[[], Program], ...] = (
    every_even_linear_frozen,
    every_even_linear_frozen_with_bias,
    all_frozen_but_the_input,
    first_linear_frozen_and_no_input_gradient,
    nothing_frozen,
    only_biases_trained,
    one_weight_in_two_linears,
    one_frozen_weight_in_two_linears,
    lora_linear,
    lora_mlp_in_bfloat16,
    a_linear_whose_output_is_detached,
    a_checkpointed_region,
)
