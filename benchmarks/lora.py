"""LoRA fine-tuning of a stack of Llama-3-8B-shaped blocks: what a step costs, by method. Needs a GPU.

A step is forward, backward and gradients set to None; bfloat16, the input wanting a gradient, every linear frozen with
an adapter of rank 16 (``--rank 0``: full fine-tuning instead). Every method runs in a process of its own, one after
the other; times are medians of device events after a warm-up, memory is torch's peak, and what is allocated before a
step (base).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from lora_model import SHAPES, MakeLinear, Stack

OURS = "te_ex + torch_compile_ex"


def build(method: str, make: Callable[..., Stack]) -> Callable:
    """The stack as a function of its input, ready to be differentiated; ``make(base=None)`` makes it."""
    from thunder_te_exec import jit_blocks, quantize_frozen_, te_ex  # before thunder

    import torch

    if method == "bf16, eager":
        return make()
    if method == "bf16, torch.compile":
        return torch.compile(make())
    if method.startswith("te.Linear"):
        return _te_linear(make, quantized="FP8 weights" in method)
    if method.startswith("torchao"):
        return torch.compile(_torchao(make(), "rowwise" if "rowwise" in method else "tensorwise"))

    import thunder
    from thunder.executors.sdpaex import sdpa_ex
    from thunder.executors.torch_compile import torch_compile_ex

    fast = [sdpa_ex, torch_compile_ex]
    if method == "thunder, bf16":
        return thunder.jit(make(), executors=fast)
    if method == "thunder's own TE executor":
        from thunder.executors.transformer_engineex import TransformerEngineTransform, transformer_engine_ex

        return thunder.jit(make(), executors=[transformer_engine_ex, *fast], transforms=[TransformerEngineTransform()])
    if method.startswith(OURS):
        stack = make()
        if "FP8 weights" in method:
            quantize_frozen_(stack, keep_transposed="both" in method)
        jit = jit_blocks if "jit_blocks" in method else thunder.jit
        return jit(stack, executors=[te_ex, *fast], te_recompute_activations="saved" not in method)
    if method == "te_ex":
        return thunder.jit(make(), executors=[te_ex, sdpa_ex])
    sys.exit(f"--method: no method {method!r}; one of {', '.join(METHODS)}")


METHODS = (
    OURS,
    f"{OURS}, jit_blocks",
    f"{OURS}, jit_blocks, FP8 weights",
    f"{OURS}, activations saved",
    f"{OURS}, FP8 weights",
    f"{OURS}, FP8 weights in both directions",
    f"{OURS}, FP8 weights, activations saved",
    "te_ex",
    "bf16, eager",
    "bf16, torch.compile",
    "te.Linear",
    "te.Linear, FP8 weights",
    "torchao tensorwise + torch.compile",
    "torchao rowwise + torch.compile",
    "thunder, bf16",
    "thunder's own TE executor",
)


def _te_linear(make: Callable[..., Stack], *, quantized: bool) -> Callable:
    import torch
    import transformer_engine.pytorch as te

    def linear(in_features: int, out_features: int) -> torch.nn.Module:
        return te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16)

    with te.quantized_model_init(enabled=True) if quantized else contextlib.nullcontext():
        stack = make(base=linear)

    def run(x):
        with te.autocast(enabled=True):
            return stack(x)

    return run


def _torchao(stack: Stack, recipe: str) -> Stack:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(stack, config=config, module_filter_fn=lambda _, name: "lora_" not in name)


def measure(method: str, shape: str, layers: int, tokens: int, batch: int, rank: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step on the device and on the host, and GiB."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    made: list[Stack] = []

    def make(base: MakeLinear | None = None) -> Stack:
        made.append(Stack(SHAPES[shape], layers, tokens, base=base, rank=rank))
        return made[0]

    with torch.device("cuda"):
        run = build(method, make)
        x = torch.randn(batch, tokens, SHAPES[shape].hidden, requires_grad=True)
        g = torch.randn_like(x)
    torch.set_default_dtype(torch.float32)
    (stack,) = made
    parameters = [p for p in stack.parameters() if p.requires_grad]
    device_ms, host_ms = [], []
    began = time.perf_counter()
    for step in range(steps + 5):
        torch.cuda.synchronize()
        if step == 1:
            first = time.perf_counter() - began
        if step == 5:
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = time.perf_counter()
        start.record()
        run(x).backward(g)
        for p in (x, *parameters):
            p.grad = None
        end.record()
        host_ms.append((time.perf_counter() - host) * 1e3)
        end.synchronize()
        device_ms.append(start.elapsed_time(end))
    return {
        "ms": statistics.median(device_ms[5:]),
        "host ms": statistics.median(host_ms[5:]),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "base GiB": torch.cuda.memory_allocated() / 2**30,
        "first step s": first,
    }


def table(results: dict[str, dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("ms", "host ms", "peak GiB", "base GiB", "first step s")
    out = Table(title=title)
    for column in ("method", "step, " + columns[0], *columns[1:]):
        out.add_column(column, justify="left" if column == "method" else "right")
    for name, r in results.items():
        out.add_row(name, *(f"{r[c]:.2f}" if c in r else "failed" for c in columns))
    Console().print(out)


def plot(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in reversed(results) if "ms" in results[name]]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.4 * len(names) + 1.6), sharey=True)
    for axis, key, label in zip(axes, ("ms", "peak GiB"), ("step, ms", "peak memory, GiB")):
        bars = axis.barh(names, [results[n][key] for n in names], color=["C1" if n == OURS else "C0" for n in names])
        axis.bar_label(bars, fmt="%.1f")
        axis.set_xlabel(label)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def main(
    method: Annotated[
        list[str] | None, typer.Option(help=f"measure this only; may be repeated: {'; '.join(METHODS)}")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "llama-3-8b",
    layers: int = 4,
    tokens: Annotated[int, typer.Option(help="sequence length")] = 2048,
    batch: int = 4,
    rank: Annotated[int, typer.Option(help="of the adapters; 0: full fine-tuning")] = 16,
    steps: int = 12,
    out: Annotated[Path | None, typer.Option(help="folder for lora.json and lora.png")] = None,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure methods, one process each, and print a table."""
    if child:
        print(json.dumps(measure(method[0], shape, layers, tokens, batch, rank, steps)))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("lora.py: torch finds no GPU here")
    options = {"--shape": shape, "--layers": layers, "--tokens": tokens, "--batch": batch, "--rank": rank}
    options["--steps"] = steps
    results: dict[str, dict[str, Any]] = {}
    for name in method or METHODS:
        command = [sys.executable, __file__, "--child", "--method", name]
        command += [str(part) for option in options.items() for part in option]
        done = subprocess.run(command, capture_output=True, text=True)
        results[name] = {"error": done.stderr[-2000:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])
        print(name, results[name], file=sys.stderr, flush=True)
    what = f"LoRA of rank {rank}" if rank else "full fine-tuning"
    title = f"{what}: {layers} {shape} blocks, {batch} x {tokens} tokens, bf16"
    table(results, title)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "lora.json").write_text(json.dumps({"title": title, "results": results}, indent=1))
        plot(results, title, out / "lora.png")
    if any("error" in r for r in results.values()):
        sys.exit("; ".join(f"{name}: {r['error']}" for name, r in results.items() if "error" in r))


if __name__ == "__main__":
    typer.run(main)
