"""Generated programs: traces ask for exactly the gradients that eager autograd would compute, with the same bits."""

from __future__ import annotations

import thunder
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thunder_te_exec import te_ex
from torch import nn
from traces import backward_linears, flags, forward_linears

Op = tuple[str, int, int]  # what, first operand, second operand or linear


class Program(nn.Module):
    """A straight-line program over (32, 32) tensors; returns the sum of its last value and of one chosen before."""

    def __init__(self, ops: list[Op], linears: int, also: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32, bias=i % 2 == 0) for i in range(linears))
        self.ops, self.also = ops, also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for what, i, j in self.ops:
            a = values[i % len(values)]
            if what == "linear":
                values.append(self.linears[j % len(self.linears)](a))
            elif what == "relu":
                values.append(torch.relu(a))
            elif what == "detach":
                values.append(a.detach())
            elif what == "mul":
                values.append(a * values[j % len(values)])
            else:
                values.append(a + values[j % len(values)])
        return values[-1] + values[self.also % len(values)]

    def live_linears(self) -> list[int]:
        """Positions among all calls of linears, of those whose value reaches the result."""
        operands: list[tuple[int, ...]] = [()]
        calls: dict[int, int] = {}
        for what, i, j in self.ops:
            n = len(operands)
            if what == "linear":
                calls[n] = len(calls)
            operands.append((i % n, j % n) if what in ("add", "mul") else (i % n,))
        live, todo = set(), [len(operands) - 1, self.also % len(operands)]
        while todo:
            value = todo.pop()
            if value not in live:
                live.add(value)
                todo += operands[value]
        return [call for value, call in calls.items() if value in live]


def gradients_of_eager(program: Program, x: torch.Tensor) -> list[tuple[bool, bool, bool]]:
    """For each call of a linear, the gradients that eager autograd computes."""
    calls = []

    def hook(module: nn.Linear, args: tuple, out: torch.Tensor) -> None:
        calls.append((module, args[0].requires_grad, out))

    handles = [linear.register_forward_hook(hook) for linear in program.linears]
    y = program(x)
    for handle in handles:
        handle.remove()
    reached, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in reached:
            reached.add(node)
            todo += [n for n, _ in node.next_functions]
    return [
        (
            wanted := out.grad_fn in reached,
            wanted and input_grad,
            wanted and module.weight.requires_grad,
            wanted and module.bias is not None and module.bias.requires_grad,
        )[1:]
        for module, input_grad, out in calls
    ]


PARAMETERS = [f"{i}.{p}" for i in range(3) for p in ("weight", "bias")]
ops = st.lists(
    st.tuples(
        st.sampled_from(("linear", "linear", "linear", "relu", "add", "mul", "detach")),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(ops, st.integers(0, 7), st.sets(st.sampled_from(PARAMETERS)), st.booleans())
def test_traces_ask_for_exactly_the_gradients_of_eager_autograd(ops, also, frozen, input_grad) -> None:
    torch.manual_seed(0)
    program = Program(ops, 3, also)
    for name, parameter in program.linears.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = torch.randn(32, 32, requires_grad=input_grad)
    expected = gradients_of_eager(program, x)
    expected = [expected[call] for call in program.live_linears()]

    compiled = thunder.jit(program, executors=[te_ex])
    y = compiled(x)
    assert flags(forward_linears(compiled)) == expected
    assert sorted(flags(backward_linears(compiled))) == sorted(e for e in expected if any(e))
    if not any(map(any, expected)):
        return
    y.sum().backward()
    some = {n: p.grad.clone() for n, p in program.named_parameters() if p.grad is not None}

    everything = Program(ops, 3, also)
    everything.load_state_dict(program.state_dict())
    compiled = thunder.jit(everything, executors=[te_ex])
    compiled(x.detach().requires_grad_()).sum().backward()
    for name, grad in some.items():
        assert torch.equal(grad, everything.get_parameter(name).grad), name
