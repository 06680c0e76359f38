"""A Llama decoder in plain torch: RMSNorm, rotary embedding, grouped-query causal attention, SwiGLU, tied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder. ``context`` is the longest sequence that it takes; ``rope_base`` is often called theta."""

    vocab_size: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    context: int
    rope_base: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    """Causal attention in which ``heads // kv_heads`` query heads share each key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.heads // config.kv_heads
        self.q_proj = nn.Linear(config.hidden, config.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self._heads(self.q_proj(x)), cos, sin)
        k = rotate(self._heads(self.k_proj(x)), cos, sin)
        v = self._heads(self.v_proj(x))
        y = F.scaled_dot_product_attention(q, self._shared(k), self._shared(v), is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * head_dim) -> (B, heads, T, head_dim)."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        """(B, kv_heads, T, head_dim) -> (B, heads, T, head_dim); thunder's attention has no ``enable_gqa``."""
        batch, kv_heads, tokens, dim = x.shape
        x = x.unsqueeze(2).expand(batch, kv_heads, self.group, tokens, dim)
        return x.reshape(batch, kv_heads * self.group, tokens, dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder layer: attention and MLP, each on the normalized residual stream and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The decoder. The head that gives the logits is the embedding's weight."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab) of the token that follows each of ``tokens``, int64 (B, T)."""
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)


def rope_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 (context, head_dim), of the angle that each position turns each dimension by."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), config.rope_base**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, T, head_dim): dimension ``i`` turns together with ``i + head_dim // 2``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
