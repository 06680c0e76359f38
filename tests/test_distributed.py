"""Delayed scaling over several processes: amaxes are reduced, so that all ranks scale alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from thunder_te_exec.recipe import DelayedScaling


def worker(rank: int, port: int, reduce_amax: bool, results) -> None:
    import thunder

    from thunder_te_exec import fp8_state_dict, te_ex

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 32, bias=False)
    recipe = DelayedScaling(amax_history_len=2, reduce_amax=reduce_amax)
    compiled = thunder.jit(linear, executors=[te_ex], te_fp8_recipe=recipe)
    x = torch.ones(16, 32) * (rank + 1)
    compiled(x).backward(torch.full((16, 32), 2.0 - rank))
    state = fp8_state_dict(compiled)
    results.put((rank, [state[f"weight.{tensor}.scale"].item() for tensor in ("input.e4m3_2", "grad_output.e5m2_2")]))
    dist.destroy_process_group()


@pytest.mark.parametrize("reduce_amax", (True, False))
def test_amaxes_are_reduced_over_the_processes_if_the_recipe_says_so(reduce_amax, tmp_path) -> None:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = free_port()
    mp.spawn(worker, args=(port, reduce_amax, results), nprocs=2)
    scales = dict(results.get() for _ in range(2))
    # The input is 1 or 2 by rank, the gradient 2 or 1: alone each rank would scale by its own.
    alone = {0: [448.0, 57344.0 / 2], 1: [448.0 / 2, 57344.0]}
    for rank in range(2):
        assert scales[rank] == ([448.0 / 2, 57344.0 / 2] if reduce_amax else alone[rank])


def uneven_worker(rank: int, port: int, results) -> None:
    import thunder

    from thunder_te_exec import fp8_state_dict, te_ex

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.head = (torch.nn.Linear(32, 32) for _ in range(4))

        def forward(self, x, whole=True):
            h = self.k(x) * self.v(x)  # which quantize x once, with q where it runs
            return self.head(self.q(x) * h) if whole else h

    torch.manual_seed(0)
    compiled = thunder.jit(Model(), executors=[te_ex], te_fp8_recipe=DelayedScaling(amax_history_len=2))
    if rank == 0:
        with torch.no_grad():
            compiled(torch.zeros(16, 32), whole=False)
    for step in range(3):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        compiled(x).sum().backward()
    state = fp8_state_dict(compiled)
    results.put((rank, {name: t.item() for name, t in state.items() if name.endswith("scale")}))
    dist.destroy_process_group()


def test_processes_that_compiled_in_another_order_reduce_the_same_amaxes() -> None:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(uneven_worker, args=(free_port(), results), nprocs=2)
    scales = dict(results.get() for _ in range(2))
    assert scales[0] == scales[1] and len(scales[0]) == 4 * 3


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
