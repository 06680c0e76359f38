"""Data-parallel training whose weight gradients wait, in two processes, with torch's DDP as the measure.

Backward gives what its caller waits for, the gradient of the input; the weights' come in ``backward_dw()``, and a hook
averages them over the processes::

    python examples/delayed_wgrad.py                  # on the CPU, over gloo
    python examples/delayed_wgrad.py --device cuda    # on two GPUs, over NCCL

Prints whether the trained parameters are those of DDP with the ordinary backward, to the last bit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from thunder_te_exec import DelayedWgrad, te_ex  # before thunder

import thunder
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PROCESSES, FEATURES, ROWS = 2, 64, 32
#: Forwards and backwards of a step; their weight gradients are worked off when the last is done.
MICROBATCHES = 2


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, FEATURES)
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def microbatches(step: int, rank: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(PROCESSES * step + rank)
    batch = torch.randn(MICROBATCHES, ROWS, FEATURES, generator=generator)
    return list(batch.to(device, torch.bfloat16))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x).float().square().mean() / MICROBATCHES


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over the processes, as DDP does: divided first, then added up."""
    for p in parameters:
        p.grad.div_(PROCESSES)
        dist.all_reduce(p.grad)


def train_delayed(rank: int, steps: int, device: torch.device) -> list[Tensor]:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jitted = thunder.jit(model, executors=[te_ex], te_delay_wgrad=True)
    wgrads = DelayedWgrad(jitted)
    waiting: list[nn.Parameter] = []

    def average_what_waited() -> None:
        if not wgrads.need_backward_dw():  # after the last microbatch
            average(waiting)

    wgrads.register_wgrad_accumulation_and_reduce_hooks(average_what_waited)
    for step in range(steps):
        optimizer.zero_grad()
        for x in microbatches(step, rank, device):
            loss_of(jitted, x).backward()
        # Here a pipeline would send its input's gradient on.
        waiting[:] = wgrads.get_backward_dw_params()
        of_weights = {id(p) for p in waiting}
        average(p for p in model.parameters() if id(p) not in of_weights)  # the norm's: they are there
        while wgrads.need_backward_dw():
            wgrads.backward_dw()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_with_ddp(rank: int, steps: int, device: torch.device) -> list[Tensor]:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    jitted = DistributedDataParallel(thunder.jit(model, executors=[te_ex]))
    for step in range(steps):
        optimizer.zero_grad()
        *first, last = microbatches(step, rank, device)
        with jitted.no_sync():
            for x in first:
                loss_of(jitted, x).backward()
        loss_of(jitted, last).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def worker(rank: int, rendezvous: str, steps: int, device_type: str) -> None:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=PROCESSES)
    delayed, ddp = (train(rank, steps, device) for train in (train_delayed, train_with_ddp))
    moved = any(not torch.equal(p, q) for p, q in zip(ddp, make_model(device).parameters()))
    same = moved and all(map(torch.equal, delayed, ddp))
    print(
        f"process {rank}: {steps} steps, parameters {'the same to the last bit' if same else 'DIFFERENT'}", flush=True
    )
    dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "rendezvous")
        mp.spawn(worker, args=(rendezvous, options.steps, options.device), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
