"""CUDA graphs of a pipeline's layers: replays give the bits of the calls that they were captured from."""

from __future__ import annotations

import pytest
import thunder
import torch
from pipeline import GPIPE, INTERLEAVED, Layer, Rank, delayed, same_gradients
from steps import same
from thunder_te_exec import CUDAGraphTransform, DelayedWgrad, autocast, fp8_state_dict, make_graphed_callables, te_ex
from thunder_te_exec.backends import te_graphs
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling
from torch import nn

RECIPES = {"delayed": lambda: DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling}
ORDERS = {
    "interleaved": INTERLEAVED,
    "gpipe": GPIPE,
    "interleaved-delayed": delayed(INTERLEAVED),
    "gpipe-delayed": delayed(GPIPE),
}


def two(recipe: str, order: str) -> tuple[Rank, Rank]:
    """Ranks of 2 chunks, 4 microbatches and 3 layers after a step, the first with graphs."""
    delays = "delayed" in order
    ranks = [Rank.of(RECIPES[recipe](), 2, 4, 3, te_delay_wgrad=delays) for _ in range(2)]
    for rank in ranks:
        rank.run(ORDERS[order], step=0)
        rank.optimizer_step()
    return ranks[0], ranks[1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_three_steps_of_a_schedule_give_the_bits_of_calls(recipe, order) -> None:
    graphed, called = two(recipe, order)
    graphed.capture(ORDERS[order])
    assert same(graphed.state(), called.state())
    assert same_gradients(graphed.gradients(), called.gradients())
    for step in (1, 2, 3):
        assert same(*(rank.run(ORDERS[order], step) for rank in (graphed, called))), f"step {step}"
        assert same_gradients(graphed.gradients(), called.gradients())
        assert any(g is not None for g in called.gradients().values())
        assert same(graphed.state(), called.state())
        for rank in (graphed, called):
            rank.optimizer_step()


def test_gradients_differ_where_parameters_have_the_order_of_one_chunk(monkeypatch) -> None:
    graphed, called = two("current", "interleaved")
    make_class = te_graphs._module_class
    wrong = iter([layer for _ in range(4) for layer in graphed.jitted])

    def in_the_wrong_order():
        class Wrong(make_class()):
            def parameters(self, recurse=True):
                return next(wrong).parameters()

        return Wrong

    monkeypatch.setattr(te_graphs, "_module_class", in_the_wrong_order)
    graphed.capture(INTERLEAVED)
    for rank in (graphed, called):
        rank.run(INTERLEAVED, step=1)
    assert not same_gradients(graphed.gradients(), called.gradients())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_weight_gradient_graphs_add_to_main_grad(dtype) -> None:
    order = delayed(INTERLEAVED)
    options = {"te_delay_wgrad": True, "te_fuse_wgrad_accumulation": True}
    ranks = [Rank.of(Float8CurrentScaling(), 2, 4, 3, **options) for _ in range(2)]
    for rank in ranks:
        for layer in rank.layers:
            if layer.trained.weight.requires_grad:
                layer.trained.weight.main_grad = torch.ones_like(layer.trained.weight, dtype=dtype)
    graphed, called = ranks
    graphed.capture(order)
    weights = [
        [layer.trained.weight for layer in r.layers if hasattr(layer.trained.weight, "main_grad")] for r in ranks
    ]
    assert all(bool((w.main_grad == 1).all()) for w in weights[0])
    for step in (1, 2):
        for rank in ranks:
            rank.run(order, step)
    assert same(*([w.main_grad for w in of] for of in weights))
    assert all(w.grad is None for w in weights[0])
    assert same_gradients(graphed.gradients(), called.gradients())


def jitted(module: nn.Module, recipe=None, **options) -> nn.Module:
    return thunder.jit(module, executors=[te_ex], te_fp8_recipe=recipe or Float8CurrentScaling(), **options)


def layers(n: int = 1) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer().to("cuda", torch.bfloat16) for _ in range(n)]


def sample() -> torch.Tensor:
    return torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def gradients(functions, x: torch.Tensor, finish=()) -> list[torch.Tensor]:
    leaf = x.detach().clone().requires_grad_()
    y = leaf
    for function in functions:
        y = function(y)
    y.backward(torch.ones_like(y))
    for wgrads in finish:
        wgrads.backward_dw()
    return [y.detach().clone(), leaf.grad]


def test_a_chain_works_off_its_weight_gradients_after_all_of_backward() -> None:
    fns, others = layers(3), layers(3)
    graphed = make_graphed_callables(
        tuple(jitted(fn, te_delay_wgrad=True) for fn in fns),
        tuple((sample(),) for _ in fns),
        order=[1, -1, -1.5],
        delay_wgrad=True,
    )
    called = [jitted(fn, te_delay_wgrad=True) for fn in others]
    for _ in range(3):
        x = sample()
        assert same(gradients(graphed, x, graphed[::-1]), gradients(called, x, [DelayedWgrad(c) for c in called]))
        for fn, other in zip(fns, others):
            assert same_gradients(*({n: p.grad for n, p in m.named_parameters()} for m in (fn, other)))


def test_one_module_gives_one_callable_and_fp8_off_is_captured_beside_fp8_on() -> None:
    (fn,), (other,) = layers(), layers()
    function = jitted(fn)
    with autocast(enabled=False):
        high = make_graphed_callables(function, (sample(),))
    low = make_graphed_callables(function, (sample(),))
    x = sample()
    assert same(gradients([low], x), gradients([jitted(other)], x))
    with autocast(enabled=False):
        expected = gradients([jitted(other)], x)
    found = gradients([high], x)
    torch.testing.assert_close(found, gradients([other], x), rtol=2**-7, atol=2**-5)
    assert same(found, expected) and not same(found, gradients([low], x))
    with autocast(recipe=DelayedScaling()):  # a replay is what was captured
        assert same(found, gradients([high], x))


def test_evaluation_is_captured_and_in_another_mode_the_module_runs() -> None:
    (fn,) = layers()
    function = jitted(fn).eval()
    x = sample().detach()
    with torch.no_grad():
        graphed = make_graphed_callables(function, (x.clone(),))
        assert torch.equal(graphed(x), function(x))
    function.train()
    assert graphed(x).requires_grad


def test_keyword_arguments_are_replayed() -> None:
    class Scaled(Layer):
        def forward(self, x, scale):
            return super().forward(x) * scale

    torch.manual_seed(0)
    function = jitted(Scaled().to("cuda", torch.bfloat16))
    one = torch.ones(1, device="cuda", dtype=torch.bfloat16)
    graphed = make_graphed_callables(function, (sample(),), sample_kwargs={"scale": one.clone()})
    x = sample()
    assert torch.equal(graphed(x, scale=2 * one), function(x, scale=2 * one))


def test_weight_gradients_wait_until_they_are_worked_off() -> None:
    (fn,) = layers()
    graphed = make_graphed_callables(jitted(fn, te_delay_wgrad=True), (sample(),), delay_wgrad=True)
    ran = []
    graphed.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(fn.trained.weight.grad is not None))
    graphed.backward_dw()  # nothing waits
    assert fn.trained.weight.grad is None and not ran and not graphed.need_backward_dw()
    y = graphed(sample())
    assert not graphed.get_backward_dw_params()
    y.sum().backward()
    assert fn.trained.weight.grad is None and graphed.need_backward_dw()
    assert {id(p) for p in graphed.get_backward_dw_params()} == {id(fn.trained.weight), id(fn.trained.bias)}
    with pytest.raises(RuntimeError, match="call backward_dw"):
        graphed(sample())
    graphed.backward_dw()
    graphed.backward_dw()
    assert ran == [True] and not graphed.need_backward_dw()


def replaced(module: nn.Module, function: nn.Module, name: str) -> None:
    """Put another parameter where calls of ``function`` look for it."""
    new = nn.Parameter(module.get_parameter(name).detach().clone())
    if name in function._overrides_parameters:
        function._overrides_parameters[name] = new
    path, _, key = name.rpartition(".")
    setattr(module.get_submodule(path), key, new)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (lambda fn, _: fn.frozen.weight.mul_(0.5), "was written to"),
        (lambda fn, _: setattr(fn.trained.weight, "data", fn.trained.weight.data.clone()), "has other memory"),
        (lambda fn, _: fn.frozen.weight.requires_grad_(), "was frozen or unfrozen"),
        (lambda fn, function: replaced(fn, function, "norm.weight"), "is another tensor"),
    ),
    ids=("written to", "moved", "unfrozen", "replaced"),
)
def test_a_parameter_that_graphs_do_not_read_any_more_is_refused_by_name(change, message) -> None:
    (fn,) = layers()
    function = jitted(fn)
    graphed = make_graphed_callables(function, (sample(),))
    with torch.no_grad():
        fn.trained.weight.mul_(0.5)  # as an optimizer does
        graphed(sample())
        change(fn, function)
    with pytest.raises(RuntimeError, match=rf"(frozen|trained|norm).weight .*{message}"):
        graphed(sample())


def test_a_backward_that_was_overwritten_or_has_run_is_refused() -> None:
    (fn,) = layers()
    graphed = make_graphed_callables(jitted(fn), (sample(),))
    first, second = graphed(sample()), graphed(sample())
    with pytest.raises(RuntimeError, match="out of the order of the capture"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="or twice"):
        second.sum().backward()
    graphed(sample()).sum().backward()


def test_a_gradient_of_the_output_leaves_nothing_to_wait() -> None:
    (fn,) = layers()
    graphed = make_graphed_callables(jitted(fn, te_delay_wgrad=True), (sample(),), delay_wgrad=True)
    y = graphed(sample())
    torch.autograd.grad(y.sum(), y, retain_graph=True)
    assert not graphed.need_backward_dw()
    y.sum().backward()
    assert graphed.need_backward_dw()


@pytest.mark.parametrize(
    "reads", (lambda x: x, lambda x: x + 0, lambda x: x.view(32, 64)), ids=("itself", "sum", "view")
)
def test_gradients_of_an_input_accumulate(reads) -> None:
    (fn,), (other,) = layers(), layers()
    functions = make_graphed_callables(jitted(fn), (sample(),)), jitted(other)
    x = sample()
    xs = x, x.detach().clone().requires_grad_()
    for n in range(3):
        for function, x in zip(functions, xs):
            (function(reads(x)).sum() * 2.0**n).backward()
    assert torch.equal(*(x.grad for x in xs))


def test_what_is_not_on_a_cuda_device_is_refused() -> None:
    (fn,) = layers()
    with pytest.raises(ValueError, match=r"callables\[0\]: expected tensors on a CUDA device alone, got one on cpu"):
        make_graphed_callables(jitted(fn), (sample().cpu(),))
    transformed = thunder.jit(fn.cpu(), executors=[te_ex], transforms=[CUDAGraphTransform()])
    for _ in range(5):
        with pytest.raises(RuntimeError, match="CUDA device"):
            transformed(sample().cpu())


def test_a_number_read_in_python_is_refused_before_the_capture() -> None:
    class Reads(Layer):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    with pytest.raises(ValueError, match=r"callables\[0\]: reads a tensor's number in Python \(item\)"):
        make_graphed_callables(jitted(Reads().to("cuda", torch.bfloat16)), (sample(),))
    (fn,) = layers()
    assert make_graphed_callables(jitted(fn), (sample(),))(sample()).requires_grad  # nothing is left behind


@pytest.mark.parametrize("delay", (False, True))
def test_what_a_capture_ran_leaves_no_trace(delay) -> None:
    (fn,) = layers()
    fn.trained.weight.grad = torch.full_like(fn.trained.weight, 3.0)
    function = jitted(fn, DelayedScaling(amax_history_len=4), te_delay_wgrad=delay)
    make_graphed_callables(function, (sample(),), delay_wgrad=delay)
    assert bool((fn.trained.weight.grad == 3).all()) and fn.norm.weight.grad is None
    state = fp8_state_dict(function)
    moving = {name: t for name, t in state.items() if not name.startswith("frozen.weight")}  # which is quantized once
    scales = [t for name, t in moving.items() if name.endswith(".scale")]
    histories = [t for name, t in moving.items() if name.endswith(".amax_history")]
    assert scales and all(bool((t == 1).all()) for t in scales) and all(bool((t == 0).all()) for t in histories)


def test_a_callable_that_was_reset_is_refused() -> None:
    (fn,) = layers()
    graphed = make_graphed_callables(jitted(fn), (sample(),))
    graphed.reset()
    with pytest.raises(RuntimeError, match="reset"):
        graphed(sample())
