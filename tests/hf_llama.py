"""A small Hugging Face Llama with peft adapters, and its training."""

from __future__ import annotations

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama() -> torch.nn.Module:
    """One layer, float32, with an adapter on each linear."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=8, target_modules=TARGETS))


def losses(function, model: torch.nn.Module) -> list[float]:
    """Of four optimizer steps on one batch; ``function`` runs ``model``."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    device = next(model.parameters()).device
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    found = []
    for _ in range(4):
        loss = function(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
