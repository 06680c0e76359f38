"""The workload of benchmarks/lora.py: a stack of Llama blocks whose linears are frozen and carry LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SHAPES", "MakeLinear", "Shape", "Stack"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a block: ``hidden`` and ``ffn`` features, ``heads`` query and ``kv_heads`` key and value heads."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "llama-3-8b": Shape(hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "small": Shape(hidden=1024, ffn=3584, heads=16, kv_heads=4),
}

#: ``make(in_features, out_features)``: a linear without bias.
MakeLinear = Callable[[int, int], nn.Module]


class LoraLinear(nn.Module):
    """``base(x) + scale * B(A(x))`` with ``base`` frozen."""

    def __init__(self, make: MakeLinear, in_features: int, out_features: int, rank: int, scale: float) -> None:
        super().__init__()
        self.base = make(in_features, out_features).requires_grad_(False)
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.01)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scale


class Block(nn.Module):
    """RMSNorm, rotary embedding, grouped-query causal attention, SwiGLU."""

    def __init__(self, shape: Shape, linear: MakeLinear) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
        self.attn_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q_proj, self.o_proj = linear(hidden, hidden), linear(hidden, hidden)
        self.k_proj, self.v_proj = linear(hidden, kv), linear(hidden, kv)
        self.gate_proj, self.up_proj = linear(hidden, shape.ffn), linear(hidden, shape.ffn)
        self.down_proj = linear(shape.ffn, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attention(self.attn_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = _rotated(self._heads(self.q_proj(x), self.shape.heads), cos, sin)
        k = _rotated(self._heads(self.k_proj(x), self.shape.kv_heads), cos, sin)
        v = self._heads(self.v_proj(x), self.shape.kv_heads)
        y = F.scaled_dot_product_attention(q, self._shared(k), self._shared(v), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.shape.head_dim).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """A key or value head for each query head; thunder's attention has no ``enable_gqa``."""
        batch, kv_heads, tokens, dim = x.shape
        group = self.shape.heads // kv_heads
        return x.unsqueeze(2).expand(batch, kv_heads, group, tokens, dim).reshape(batch, -1, tokens, dim)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Stack(nn.Module):
    """``layers`` blocks; (B, T, hidden) to (B, T, hidden).

    Args:
        base: makes the large linears; ``nn.Linear`` where not given.
        rank: of the adapters; 0 trains the large linears themselves.
    """

    def __init__(
        self, shape: Shape, layers: int, tokens: int, *, base: MakeLinear | None = None, rank: int = 16
    ) -> None:
        super().__init__()

        def plain(in_features: int, out_features: int) -> nn.Module:
            return nn.Linear(in_features, out_features, bias=False)

        make = base or plain

        def linear(in_features: int, out_features: int) -> nn.Module:
            if not rank:
                return make(in_features, out_features)
            return LoraLinear(make, in_features, out_features, rank, scale=2.0)

        self.blocks = nn.ModuleList(Block(shape, linear) for _ in range(layers))
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(torch.arange(tokens, dtype=torch.float32), 500000.0**-half).repeat(1, 2)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x
