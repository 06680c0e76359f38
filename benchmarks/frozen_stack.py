"""A stack of frozen linears whose input wants a gradient: what a step costs and keeps, by method. Needs a GPU.

Every method runs in a process of its own, so that peaks and caches do not mix. A step is forward, backward and
gradients set to None; times are medians of device events after a warm-up.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import typer

METHODS = ("te_ex", "te_ex, nothing frozen", "te.Linear", "thunder's own TE executor", "bf16, eager")


def build(method: str, layers: int, features: int) -> Callable:
    """The stack as a function of its input, ready to be differentiated."""
    from thunder_te_exec import te_ex  # before thunder

    import thunder
    import torch

    torch.manual_seed(0)
    kwargs = {"bias": False, "device": "cuda"}
    if method == "te.Linear":
        import transformer_engine.pytorch as te

        module = torch.nn.Sequential(
            *(te.Linear(features, features, params_dtype=torch.bfloat16, **kwargs) for _ in range(layers))
        )
    else:
        module = torch.nn.Sequential(
            *(torch.nn.Linear(features, features, dtype=torch.bfloat16, **kwargs) for _ in range(layers))
        )
    module.requires_grad_(method == "te_ex, nothing frozen")
    if method.startswith("te_ex"):
        return thunder.jit(module, executors=[te_ex])
    if method == "thunder's own TE executor":
        from thunder.executors.transformer_engineex import TransformerEngineTransform, transformer_engine_ex

        return thunder.jit(module, executors=[transformer_engine_ex], transforms=[TransformerEngineTransform()])
    if method == "te.Linear":

        def run(x):
            with te.autocast(enabled=True):
                return module(x)

        return run
    return module


def measure(method: str, layers: int, features: int, rows: int, steps: int) -> dict[str, float]:
    """Milliseconds a step, peak bytes beyond parameters and input, and host milliseconds a step."""
    import time

    import torch

    run = build(method, layers, features)
    x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn_like(x)
    times, host = [], []
    for step in range(steps + 5):
        if step == 5:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        run(x).backward(g)
        end.record()
        host.append((time.perf_counter() - began) * 1e3)
        x.grad = None
        end.synchronize()
        times.append(start.elapsed_time(end))
    base = layers * features * features * 2 + 2 * rows * features * 2
    return {
        "ms": statistics.median(times[5:]),
        "host ms": statistics.median(host[5:]),
        "MiB": (torch.cuda.max_memory_allocated() - base) / 2**20,
    }


def main(
    layers: int = 8, features: int = 4096, rows: int = 8192, steps: int = 20, method: str = "", as_json: bool = False
) -> None:
    """Measure all methods, one process each, and print a table; --method measures one of them in this process."""
    if method:
        print(json.dumps(measure(method, layers, features, rows, steps)))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("frozen_stack.py: torch finds no GPU here, and every method but bf16 needs one")
    options = ["--layers", layers, "--features", features, "--rows", rows, "--steps", steps]
    results = {}
    for name in METHODS:
        command = [sys.executable, __file__, *map(str, options), "--method", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        results[name] = json.loads(done.stdout.splitlines()[-1])
    if as_json:
        print(json.dumps(results))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{layers} x Linear({features}, {features}), {rows} rows, bf16, forward and backward")
    for column in ("method", "step, ms", "host, ms", "peak beyond weights, input and gradient, MiB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, r in results.items():
        table.add_row(name, f"{r['ms']:.2f}", f"{r['host ms']:.2f}", f"{r['MiB']:.0f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
