"""A training run in processes of its own, whole, or stopped and resumed from what it wrote.

As a program: ``resumed_run.py FIRST LAST FOLDER DEVICE`` runs steps FIRST to LAST, prints each loss as exact text, and
goes on from the files in FOLDER where FIRST is not 0.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from thunder_te_exec import fp8_state_dict, load_fp8_state_dict, te_ex
from thunder_te_exec.recipe import DelayedScaling

import thunder


def whole_and_resumed(folder: Path, device: str) -> tuple[list[str], list[str]]:
    """Losses of eight steps, and of the same steps stopped after the fifth."""

    def run(first: int, last: int, name: str) -> list[str]:
        (folder / name).mkdir(exist_ok=True)
        command = [sys.executable, __file__, str(first), str(last), str(folder / name), device]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run(0, 8, "whole"), run(0, 5, "parts") + run(5, 8, "parts")


def main(first: int, last: int, folder: Path, device: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to(device)
    compiled = thunder.jit(module, executors=[te_ex], te_fp8_recipe=DelayedScaling(amax_history_len=4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if first:
        module.load_state_dict(load_file(folder / "model.safetensors"))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
        load_fp8_state_dict(compiled, load_file(folder / "fp8.safetensors"))
    for step in range(first, last):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (compiled(x) - x.flip(1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
    save_file(module.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    save_file(fp8_state_dict(compiled), folder / "fp8.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
