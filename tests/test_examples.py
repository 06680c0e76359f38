"""The examples: the loader against transformers' own, and the fine-tuning from end to end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import thunder_te_exec  # noqa: F401  (before thunder, which the examples import)

import torch
from pydoc_data.topics import topics

pytest.importorskip("typer", reason="the examples need the extra [demo]")
from typer.testing import CliRunner

LAYERS = 2
EXAMPLES = str(Path(__file__).parent.parent / "examples")


@pytest.fixture(autouse=True, scope="module")
def examples_on_path() -> Iterator[None]:
    sys.path.insert(0, EXAMPLES)
    yield
    sys.path.remove(EXAMPLES)


@pytest.fixture(scope="module")
def loaded(examples_on_path):
    import smollm2

    return smollm2.load(layers=LAYERS)


def run(*options: str):
    import finetune_lora

    return CliRunner().invoke(finetune_lora.app, options)


def test_decoding_gives_the_text_back(loaded) -> None:
    _, tokenizer = loaded
    text = "<|im_start|>user\nnaïve café, 日本 \t 🙂  x = 12345<|im_end|>\n" + "\n\n".join(topics.values())
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_special_tokens_are_tokens_of_their_own(loaded) -> None:
    _, tokenizer = loaded
    assert tokenizer.encode("in 2024<|im_end|>").tokens == ["in", "Ġ", "2", "0", "2", "4", "<|im_end|>"]


@torch.no_grad()
def test_logits_are_those_of_transformers_from_the_same_file(loaded) -> None:
    import smollm2
    from transformers import AutoModelForCausalLM

    model, _ = loaded
    path = smollm2.default_path()
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    oracle.model.layers = oracle.model.layers[:LAYERS]
    tokens = torch.randint(model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = oracle(tokens, use_cache=False).logits
    # Rounding alone: float32's step at the largest logit, some 30 times over for the sums in between.
    atol = 32 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=atol)


def test_loader_names_what_it_cannot_load(examples_on_path, tmp_path) -> None:
    import smollm2

    with pytest.raises(ValueError, match="layers = 31: the GGUF file holds 30 layers"):
        smollm2.load(layers=31)
    with pytest.raises(FileNotFoundError, match="expected a GGUF file"):
        smollm2.load(tmp_path / "absent.gguf")


def test_fine_tuning_runs_and_writes_its_files(tmp_path) -> None:
    sizes = ("--layers", "1", "--steps", "2", "--seq-len", "32", "--batch-size", "1")
    result = run(*sizes, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "the same to the last bit" in result.output
    from safetensors.torch import load_file

    adapter = load_file(tmp_path / "adapter.safetensors")
    assert len(adapter) == 14 and all(".lora_" in name for name in adapter)
    assert any(t.any() for name, t in adapter.items() if "lora_B" in name)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_no_fp8_gemm_takes_fail_early(tmp_path) -> None:
    result = run("--seq-len", "30", "--batch-size", "1", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "expected a multiple of 16" in " ".join(result.output.replace("│", " ").split())


def test_delayed_weight_gradients_of_two_processes_end_at_the_parameters_of_ddp() -> None:
    done = subprocess.run(
        [sys.executable, f"{EXAMPLES}/delayed_wgrad.py", "--steps", "2"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters the same to the last bit") == 2
