"""thunderfx: a Hugging Face Llama with peft adapters trains, its frozen linears pruned as under thunder.jit."""

from __future__ import annotations

import pytest

peft = pytest.importorskip("peft", reason="needs the extra [demo]")
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from programs import Checkpointed
from thunder.dynamo import thunderfx
from thunder_te_exec import claims, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from traces import backward_linears, flags, forward_linears
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama() -> torch.nn.Module:
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(4):
        loss = function(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_llama_with_adapters_trains_and_its_frozen_linears_compute_no_weight_gradient() -> None:
    model = llama()
    function = thunderfx(model, executors=[te_ex], te_fp8_recipe=Float8CurrentScaling())
    ours = losses(function, model)
    model = llama()
    eager = losses(model, model)
    # FP8 rounds each number by at most 2**-4 of it; the losses of a random model differ by far less.
    assert all(abs(a - b) < 2.0**-4 for a, b in zip(ours, eager)) and ours[-1] < ours[0]

    compiled = [fn for info in function._backend.subgraph_infos for fn in info.thunder_compiled_fns]
    (training,) = [fn for fn in compiled if claims(fn)]
    assert sum(c.claimed for c in claims(training)) == len(TARGETS) + 1  # and the head
    assert not any(c.claimed for c in claims(training) if "lora" in c.weight)
    assert len(forward_linears(training)) == len(TARGETS) + 1
    # q, k and v of the only layer read the frozen embedding: nobody wants a gradient of theirs.
    assert flags(backward_linears(training)) == [(True, False, False)] * (len(TARGETS) + 1 - 3)


def steps(checkpoint: bool, recipe) -> tuple[list[torch.Tensor], list[str]]:
    """Outputs and gradients of three steps, and the names of the FP8 symbols of the backward."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Checkpointed(checkpoint)
    function = thunderfx(module, executors=[te_ex], te_fp8_recipe=recipe())
    found = []
    for n in range(3):
        module.zero_grad()
        x = (torch.randn(32, 32, generator=torch.Generator().manual_seed(n)) * 3.0**n).requires_grad_()
        y = function(x)
        y.sum().backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    (compiled,) = (fn for info in function._backend.subgraph_infos for fn in info.thunder_compiled_fns)
    return found, [b.sym.name for b in thunder.last_backward_traces(compiled)[-1].bound_symbols]


@pytest.mark.parametrize(
    "recipe", (lambda: DelayedScaling(amax_history_len=2), Float8CurrentScaling), ids=("delayed", "current")
)
def test_checkpointing_under_thunderfx_changes_no_bit(recipe) -> None:
    plain, names = steps(False, recipe)
    checkpointed, recomputed = steps(True, recipe)
    assert all(map(torch.equal, plain, checkpointed))
    assert "te_recompute_linear_1" in recomputed and not any(n.startswith("te_recompute") for n in names)
