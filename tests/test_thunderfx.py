"""thunderfx: a Hugging Face Llama with peft adapters trains, its frozen linears pruned as under thunder.jit."""

from __future__ import annotations

import pytest

pytest.importorskip("peft", reason="needs the extra [demo]")
import thunder_te_exec  # noqa: F401  (before thunder)
from hf_llama import TARGETS, llama, losses
from programs import Checkpointed
from steps import same, under_thunderfx
from thunder.dynamo import thunderfx
from thunder_te_exec import claims, te_ex
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from traces import backward_linears, flags, forward_linears


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


@pytest.mark.parametrize(
    "recipe", (lambda: DelayedScaling(amax_history_len=2), Float8CurrentScaling), ids=("delayed", "current")
)
def test_checkpointing_under_thunderfx_changes_no_bit(recipe) -> None:
    modules = Checkpointed(False), Checkpointed(True)
    modules[1].load_state_dict(modules[0].state_dict())
    (plain, names), (checkpointed, recomputed) = (under_thunderfx(module, recipe()) for module in modules)
    assert same(plain, checkpointed)
    assert "te_recompute_linear_1" in recomputed and not any(n.startswith("te_recompute") for n in names)
