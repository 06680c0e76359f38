"""What frozen parameters save, in bytes."""

from __future__ import annotations

import thunder
import torch
from programs import every_even_linear_frozen
from thunder_te_exec import te_ex
from torch import nn
from traces import tensors_saved


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    y = thunder.jit(module, executors=[te_ex])(x)
    own = {p.data_ptr() for p in module.parameters()}
    return sum(t.nbytes for t in tensors_saved(y) if t.data_ptr() not in own)


def test_the_program_with_frozen_linears_saves_fewer_bytes_than_with_none() -> None:
    module, x = every_even_linear_frozen()
    module, x = module.to("cuda", torch.bfloat16), x.detach().to("cuda", torch.bfloat16).requires_grad_()
    frozen = saved_bytes(module, x)
    module.requires_grad_(True)
    nothing_frozen = saved_bytes(module, x)
    # A trained linear keeps its input and its weight, a byte an element, and two scales; a frozen one its weight.
    assert nothing_frozen == 4 * 2 * (32 * 32 + 4)
    assert frozen == (2 * 2 + 2 * 1) * (32 * 32 + 4)


def peak_of_a_step(compiled, x: torch.Tensor) -> int:
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        y = compiled(x)
        y.backward(torch.ones_like(y))
        x.grad = None
        del y
    return torch.cuda.max_memory_allocated()


def test_a_frozen_stack_peaks_below_thunders_own_executor() -> None:
    from thunder.executors.transformer_engineex import TransformerEngineTransform, transformer_engine_ex

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).to("cuda", torch.bfloat16)
    module.requires_grad_(False)
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ours = peak_of_a_step(thunder.jit(module, executors=[te_ex]), x)
    theirs = peak_of_a_step(
        thunder.jit(module, executors=[transformer_engine_ex], transforms=[TransformerEngineTransform()]), x
    )
    print(f"peak of a step: ours {ours / 2**20:.1f} MiB, thunder's own {theirs / 2**20:.1f} MiB")
    assert ours < theirs
