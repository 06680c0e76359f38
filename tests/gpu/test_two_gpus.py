"""Two processes with a GPU each, over NCCL, against ``te.Linear`` in the same processes."""

from __future__ import annotations

import os

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from te_modules import te_linear
from thunder_te_exec.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from torch import nn

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "blocks": Float8BlockScaling,
}


def train(rank: int, address: str, recipe: str, results) -> None:
    import thunder
    import transformer_engine.pytorch as te
    from torch.nn.parallel import DistributedDataParallel
    from thunder_te_exec import te_ex

    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
    theirs = nn.Sequential(*map(te_linear, model))
    jitted = thunder.jit(model, executors=[te_ex])
    wrapped = [DistributedDataParallel(m, device_ids=[rank]) for m in (jitted, theirs)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in wrapped]
    for n in range(5):
        generator = torch.Generator().manual_seed(2 * n + rank)
        # Another range on every rank and in every step: scales that were not reduced would differ.
        x = (torch.randn(64, 256, generator=generator) * 3.0**n * (1 + 7 * rank)).to("cuda", torch.bfloat16)
        found = []
        for module, optimizer in zip(wrapped, optimizers):
            optimizer.zero_grad()
            with te.autocast(recipe=RECIPES[recipe](), amax_reduction_group=dist.group.WORLD):
                y = module(x)
            y.float().square().mean().backward()
            found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
            optimizer.step()
        results.put((rank, n, all(map(torch.equal, *found)), [p.detach().float().cpu() for p in model.parameters()]))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", RECIPES)
def test_data_parallel_training_gives_the_bits_of_te_linear_and_the_same_weights_on_both(recipe, tmp_path) -> None:
    context = mp.get_context("spawn")
    results = context.Manager().Queue()
    mp.spawn(train, args=(f"file://{tmp_path / 'store'}", recipe, results), nprocs=2)
    found = [results.get() for _ in range(10)]
    assert all(equal for _, _, equal, _ in found), [(rank, step) for rank, step, equal, _ in found if not equal]
    one, other = ({step: ps for r, step, _, ps in found if r == rank} for rank in (0, 1))
    assert all(all(map(torch.equal, one[step], other[step])) for step in range(5))
