"""LoRA fine-tuning of a stack of Llama-3-8B-shaped blocks: what a step costs, by method. Needs a GPU.

A step is forward, backward and gradients set to None; bfloat16, the input wanting a gradient, every linear frozen with
an adapter of rank 16 (``--rank 0``: full fine-tuning instead). Every method runs in a process of its own, and is
measured while the others wait; times are medians of device events after a warm-up, memory is torch's peak, and what is
allocated before a step (base). ``--graphs`` measures what runs as CUDA graphs, beside what Python runs.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from lora_model import SHAPES, MakeLinear, Stack

OURS = "te_ex + torch_compile_ex"
GRAPHS, WHOLE = "CUDA graphs", "the whole step one CUDA graph"
READY = "ready to be measured"


def build(method: str, make: Callable[..., Stack]) -> Callable:
    """The stack as a function of its input, ready to be differentiated; ``make(base=None)`` makes it."""
    from thunder_te_exec import jit_blocks, make_graphed_callables, quantize_frozen_, te_ex  # before thunder

    import torch

    if method == "bf16, eager":
        return make()
    if method == "bf16, torch.compile":
        return torch.compile(make())
    method = method.removesuffix(f", {WHOLE}")
    if method.startswith("te.Linear"):
        return _te_linear(make, quantized="FP8 weights" in method, graphs=method.endswith(GRAPHS))
    mode = "reduce-overhead" if method.endswith(GRAPHS) else None
    if method == f"bf16, torch.compile, {GRAPHS}":
        return torch.compile(make(), mode=mode)
    if method.startswith("torchao"):
        return torch.compile(_torchao(make(), "rowwise" if "rowwise" in method else "tensorwise"), mode=mode)

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
        jitted = jit(stack, executors=[te_ex, *fast], te_recompute_activations="saved" not in method)
        return _graphed(lambda x: make_graphed_callables(jitted, (x,))) if method.endswith(GRAPHS) else jitted
    if method == "te_ex":
        return thunder.jit(make(), executors=[te_ex, sdpa_ex])
    sys.exit(f"--method: no method {method!r}; one of {'; '.join(ALL)}")


#: What is measured where ``--method`` is not given.
METHODS = (
    f"{OURS}, jit_blocks",
    f"{OURS}, jit_blocks, FP8 weights",
    "torchao tensorwise + torch.compile",
    "torchao rowwise + torch.compile",
    "te.Linear",
    "te.Linear, FP8 weights",
    "bf16, torch.compile",
    "bf16, eager",
    "thunder, bf16",
    "thunder's own TE executor",
)
VARIANTS = (
    OURS,
    f"{OURS}, activations saved",
    f"{OURS}, jit_blocks, activations saved",
    f"{OURS}, FP8 weights",
    f"{OURS}, FP8 weights in both directions",
    f"{OURS}, FP8 weights, activations saved",
    "te_ex",
)
#: What ``--graphs`` measures. "CUDA graphs" are one of forward and one of backward: make_graphed_callables, ours or
#: Transformer Engine's, or torch.compile's; the whole step is captured with torch.cuda.graph, its gradients where they
#: were.
GRAPHED = (
    f"{OURS}, jit_blocks, {WHOLE}",
    f"{OURS}, jit_blocks, {GRAPHS}",
    f"{OURS}, jit_blocks, FP8 weights, {GRAPHS}",
    f"te.Linear, {WHOLE}",
    f"te.Linear, {GRAPHS}",
    f"torchao tensorwise + torch.compile, {GRAPHS}",
    f"bf16, torch.compile, {GRAPHS}",
    f"{OURS}, jit_blocks",
    "te.Linear",
    "torchao tensorwise + torch.compile",
    "bf16, torch.compile",
    "bf16, eager",
)
ALL = tuple(dict.fromkeys(METHODS + VARIANTS + GRAPHED))


def _graphed(capture: Callable[[Any], Callable]) -> Callable:
    """A function of the input that is captured at its first call, for inputs like that one."""
    graphed: list[Callable] = []

    def run(x):
        if not graphed:
            graphed.append(capture(x.detach().clone().requires_grad_()))
        return graphed[0](x)

    return run


def _te_linear(make: Callable[..., Stack], *, quantized: bool, graphs: bool) -> Callable:
    import torch
    import transformer_engine.pytorch as te

    def linear(in_features: int, out_features: int) -> torch.nn.Module:
        return te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16)

    with te.quantized_model_init(enabled=True) if quantized else contextlib.nullcontext():
        stack = make(base=linear)
    function = _graphed(lambda x: te.make_graphed_callables(stack, (x,), enabled=True)) if graphs else stack

    def run(x):
        with te.autocast(enabled=True):
            return function(x)

    return run


def _torchao(stack: Stack, recipe: str) -> Stack:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(stack, config=config, module_filter_fn=lambda _, name: "lora_" not in name)


def measure(
    method: str,
    shape: str,
    layers: int,
    tokens: int,
    batch: int,
    rank: int,
    steps: int,
    wait: Callable[[], Any] = bool,
) -> dict[str, Any]:
    """Milliseconds a step on the device and the host, and GiB; ``wait`` is called between compiling and measuring."""
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

    def called() -> None:
        run(x).backward(g)
        for p in (x, *parameters):
            p.grad = None

    def step(whole: Callable[[], None] = called) -> tuple[float, float]:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host = time.perf_counter()
        start.record()
        whole()
        end.record()
        host_ms = (time.perf_counter() - host) * 1e3
        end.synchronize()
        return start.elapsed_time(end), host_ms

    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    for _ in range(2):
        step()
    whole = called
    if method.endswith(WHOLE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(x).backward(g)
        whole = graph.replay
    wait()
    for _ in range(3):
        step(whole)
    torch.cuda.reset_peak_memory_stats()
    device_ms, host_ms = zip(*(step(whole) for _ in range(steps)))
    return {
        "ms": statistics.median(device_ms),
        "host ms": statistics.median(host_ms),
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "base GiB": torch.cuda.memory_allocated() / 2**30,
        "first step s": first,
    }


def measured_in_turn(names: Sequence[str], options: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of ``names`` in a process of its own, all of which compile at once."""
    command = [sys.executable, __file__, "--child", *options]
    with contextlib.ExitStack() as stack:
        children = []
        for name in names:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            children.append(
                (name, stack.enter_context(subprocess.Popen([*command, "--method", name], **pipes)), errors)
            )
        for _, child, _ in children:
            _until(child, READY)
        for name, child, errors in children:
            with contextlib.suppress(BrokenPipeError):  # it has failed
                child.stdin.write("go\n")
                child.stdin.flush()
            line = _until(child, "{")
            errors.seek(0)
            yield name, json.loads(line) if line else {"error": errors.read()[-2000:]}


def _until(child: subprocess.Popen, prefix: str) -> str:
    """The next line of ``child`` that begins with ``prefix``; empty where it ends before."""
    return next((line for line in child.stdout if line.startswith(prefix)), "")


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
        bars = axis.barh(
            names, [results[n][key] for n in names], color=["C1" if n.startswith(OURS) else "C0" for n in names]
        )
        axis.bar_label(bars, fmt="%.1f", padding=2)
        axis.margins(x=0.15)
        axis.set_xlabel(label)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)


def main(
    method: Annotated[
        list[str] | None, typer.Option(help=f"measure this only; may be repeated: {'; '.join(ALL)}")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "llama-3-8b",
    layers: int = 4,
    tokens: Annotated[int, typer.Option(help="sequence length")] = 2048,
    batch: int = 4,
    rank: Annotated[int, typer.Option(help="of the adapters; 0: full fine-tuning")] = 16,
    steps: int = 12,
    jobs: Annotated[
        int, typer.Option(help="methods that compile at once, each beside the others' memory; first steps take longer")
    ] = 1,
    graphs: Annotated[bool, typer.Option(help="measure what runs as CUDA graphs, beside what does not")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for lora.json and lora.png")] = None,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure methods, one process each, and print a table."""
    if child:

        def wait() -> None:
            print(READY, flush=True)
            sys.stdin.readline()

        print(json.dumps(measure(method[0], shape, layers, tokens, batch, rank, steps, wait)), flush=True)
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("lora.py: torch finds no GPU here")
    options = {"--shape": shape, "--layers": layers, "--tokens": tokens, "--batch": batch, "--rank": rank}
    options["--steps"] = steps
    flat = [str(part) for option in options.items() for part in option]
    names = list(method or (GRAPHED if graphs else METHODS))
    results: dict[str, dict[str, Any]] = {}
    for begin in range(0, len(names), jobs):
        for name, result in measured_in_turn(names[begin : begin + jobs], flat):
            results[name] = result
            print(name, result, file=sys.stderr, flush=True)
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
