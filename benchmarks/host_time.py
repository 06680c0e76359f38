"""Host time of a frozen linear: what Python costs before a kernel is launched. Needs a GPU.

A stack of small linears, all frozen, their input wanting a gradient. Times are of the calls alone, the device not being
waited for, medians over steps; a linear's are the difference between a long and a short stack, divided by the number of
linears between them, so that what a call costs beside its linears is left out (and shown on its own).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

SHORT, LONG = 2, 34
METHODS = ("te_ex", "te_ex, FP8 weights", "te.Linear", "te.Linear, FP8 weights", "bf16, eager")


def build(method: str, layers: int, features: int) -> Callable:
    """A stack of ``layers`` frozen linears as a function of its input."""
    from thunder_te_exec import quantize_frozen_, te_ex  # before thunder

    import thunder
    import torch
    from torch import nn

    def stack(make: Callable[..., nn.Module]) -> nn.Module:
        return nn.Sequential(*(make(features, features, bias=False) for _ in range(layers))).requires_grad_(False)

    if method.startswith("te.Linear"):
        import transformer_engine.pytorch as te

        with te.quantized_model_init(enabled="FP8" in method):
            module = stack(te.Linear)

        def run(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True):
                return module(x)

        return run
    module = stack(nn.Linear)
    if method.startswith("bf16"):
        return module
    if "FP8" in method:
        quantize_frozen_(module)
    return thunder.jit(module, executors=[te_ex])


def measure(method: str, layers: int, features: int, rows: int, steps: int) -> tuple[float, float]:
    """Microseconds of host time of a forward and of a backward."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        run = build(method, layers, features)
        x = torch.randn(rows, features, requires_grad=True)
        g = torch.randn(rows, features)
    torch.set_default_dtype(torch.float32)
    forward, backward = [], []
    for _ in range(steps + 5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = run(x)
        middle = time.perf_counter()
        y.backward(g)
        backward.append((time.perf_counter() - middle) * 1e6)
        forward.append((middle - start) * 1e6)
        x.grad = None
    return statistics.median(forward[5:]), statistics.median(backward[5:])


def main(
    method: Annotated[list[str] | None, typer.Option(help=f"may be repeated: {'; '.join(METHODS)}")] = None,
    features: Annotated[int, typer.Option(help="of every linear: small, so that the device keeps up")] = 256,
    rows: int = 64,
    steps: int = 40,
) -> None:
    """Measure methods one after the other, and print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"host time, microseconds: frozen {features} x {features} linears, {rows} rows, bf16")
    for column in ("method", "forward of a linear", "backward of a linear", "forward, the rest", "backward, the rest"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in method or METHODS:
        short, long = (measure(name, layers, features, rows, steps) for layers in (SHORT, LONG))
        each = [(b - a) / (LONG - SHORT) for a, b in zip(short, long)]
        rest = [a - SHORT * e for a, e in zip(short, each)]
        table.add_row(name, *(f"{t:.0f}" for t in (*each, *rest)))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
