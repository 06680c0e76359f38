"""CUDA graphs where there is no CUDA device: what is checked, what traces look like, and what is said."""

from __future__ import annotations

import copy

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from pipeline import INTERLEAVED, Layer
from programs import every_even_linear_frozen
from thunder_te_exec import CUDAGraphTransform, fp8_state_dict, jit_blocks, make_graphed_callables, te_ex
from thunder_te_exec.checkpoint import fp8_state_kept
from thunder_te_exec.graphed_layer import GraphedLayer, left_as_they_were
from thunder_te_exec.recipe import DelayedScaling
from traces import as_text

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def jitted(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    return thunder.jit(Layer(), executors=[te_ex], **options)


def sample() -> torch.Tensor:
    return torch.randn(32, 64, requires_grad=True)


@without_cuda
def test_graphs_without_a_cuda_device_are_refused() -> None:
    with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device"):
        make_graphed_callables(jitted(), (sample(),))
    with pytest.raises(RuntimeError, match="expected tensors on a CUDA device alone"):
        jitted(transforms=[CUDAGraphTransform()])(sample())


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ({"sample_args": ()}, "sample_args: expected 2, one for each of the callables, got 0"),
        ({"sample_kwargs": ({},)}, "sample_kwargs: expected 2, as many as sample_args, got 1"),
        ({"num_layers_per_chunk": [2]}, "num_layers_per_chunk: expected with an order"),
        ({"order": INTERLEAVED}, "sample_args: expected 8"),
        ({"order": [1, -1, 2]}, "as many forwards as backwards"),
        ({"delay_wgrad": True}, "order: expected one with delay_wgrad=True and several callables"),
        (
            {"delay_wgrad": True, "order": [1, -1, -1.5]},
            r"callables\[0\]: jitted with te_delay_wgrad=False, and delay_wgrad=True",
        ),
    ),
)
def test_what_does_not_fit_is_refused_before_anything_runs(given, message) -> None:
    arguments = {"callables": (jitted(), jitted()), "sample_args": ((sample(),), (sample(),))} | given
    with pytest.raises(ValueError, match=message):
        make_graphed_callables(**arguments)


def test_what_is_not_jitted_or_not_in_one_mode_is_refused_by_its_place() -> None:
    args = ((sample(),), (sample(),))
    with pytest.raises(TypeError, match=r"callables\[1\]: expected what thunder.jit or jit_blocks returned, got Layer"):
        make_graphed_callables((jitted(), Layer()), args)
    with pytest.raises(ValueError, match="training mode"):
        make_graphed_callables((jitted(), jitted().eval()), args)
    with pytest.raises(ValueError, match=r"callables\[0\]: jitted with te_delay_wgrad=True, and delay_wgrad=False"):
        make_graphed_callables(jitted(te_delay_wgrad=True), (sample(),))


@pytest.mark.parametrize("inner", ("", "trained"))
def test_a_module_with_hooks_is_refused(inner) -> None:
    function = jitted()
    function.get_submodule(inner).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=rf"callables\[0\]: {inner or 'the module'} has a hook \(forward_hooks\)"):
        make_graphed_callables(function, (sample(),))


@pytest.mark.parametrize("register", ("register_hook", "register_post_accumulate_grad_hook"))
def test_a_parameter_with_hooks_is_refused(register) -> None:
    function = jitted()
    getattr(function.get_parameter("trained.weight"), register)(lambda _: None)
    with pytest.raises(ValueError, match=r"callables\[0\]: the parameter trained.weight has a hook"):
        make_graphed_callables(function, (sample(),))


def test_gradients_that_wait_are_not_lost_in_a_capture() -> None:
    function = jitted(te_delay_wgrad=True)
    step(function)
    with pytest.raises(ValueError, match=r"callables\[0\]: weight gradients wait"):
        make_graphed_callables(function, (sample(),), delay_wgrad=True)


def test_a_module_with_graphs_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"callables\[0\]: jitted with a CUDAGraphTransform"):
        make_graphed_callables(jitted(transforms=[CUDAGraphTransform()]), (sample(),))


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ({"callables": 3}, "callables: expected a jitted module, or a tuple of them, got int"),
        ({"sample_args": (torch.ones(3),)}, "sample_args: expected a tuple of tensors for one callable"),
        ({"sample_args": None}, "sample_args: expected a tuple of tensors"),
        ({"sample_args": ((3,),)}, r"sample_args\[0\]: expected tensors, got int"),
        ({"sample_kwargs": ((),)}, "sample_kwargs: expected a dict for one callable"),
        ({"order": 7}, "order: expected a list of numbers, got 7"),
    ),
)
def test_arguments_of_other_types_are_named(given, message) -> None:
    with pytest.raises(TypeError, match=message):
        make_graphed_callables(**{"callables": (jitted(),), "sample_args": ((sample(),),)} | given)


def test_callables_are_each_given_once_and_warmed_up_and_schedules_are_for_training() -> None:
    function = jitted()
    args = ((sample(),), (sample(),))
    with pytest.raises(ValueError, match="none of them twice"):
        make_graphed_callables((function, function), args)
    with pytest.raises(ValueError, match="expected one or more"):
        make_graphed_callables((), ())
    with pytest.raises(ValueError, match="num_warmup_iters: expected 1 or more, got 0"):
        make_graphed_callables(function, (sample(),), 0)
    with pytest.raises(ValueError, match="is for modules in training mode"):
        make_graphed_callables((function.eval(),), ((sample(),),), order=[1, -1])


def test_a_forward_and_a_backward_become_a_graph_each_with_the_update_of_scales_outside(golden) -> None:
    module, x = every_even_linear_frozen()
    function = thunder.jit(module, executors=[te_ex], transforms=[CUDAGraphTransform()])
    with pytest.raises(RuntimeError, match="CUDA device"):
        function(x)
    text = as_text(thunder.last_traces(function)[-1], *thunder.last_backward_traces(function)[-1:])
    assert text == golden(name="cuda_graphs_every_even_linear_frozen")


def test_delayed_weight_gradients_in_graphs_of_traces_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="te_delay_wgrad=True with CUDAGraphTransform"):
        jitted(transforms=[CUDAGraphTransform()], te_delay_wgrad=True)(sample())


def recipe() -> DelayedScaling:
    return DelayedScaling(amax_history_len=4)


def step(function, scale: float = 1.0) -> torch.Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * scale
    y = function(x.requires_grad_())
    y.backward(torch.ones_like(y))
    return y.detach()


def moved(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, t in state.items() if not torch.equal(t, before[name])}


@pytest.mark.parametrize("jit", (thunder.jit, jit_blocks), ids=("jit", "jit_blocks"))
def test_state_is_kept_of_linears_that_had_run_and_of_those_that_had_not(jit) -> None:
    function = jit(torch.nn.Sequential(Layer()), executors=[te_ex], te_fp8_recipe=recipe())
    with fp8_state_kept(function):
        for _ in range(3):
            step(function)
    state = fp8_state_dict(function)
    once = {name for name in state if ".frozen.weight." in name}  # a frozen weight's, which is not quantized again
    assert len(once) == 2
    for name in state.keys() - once - {"thunder_te_exec.recipes"}:
        assert bool((state[name] == (1 if name.endswith(".scale") else 0)).all()), name
    step(function)
    assert not {name for name in moved(fp8_state_dict(function), state) & once if name.endswith(".scale")}

    before = fp8_state_dict(function)
    with pytest.raises(ZeroDivisionError), fp8_state_kept(function):
        step(function, 8.0)
        assert moved(fp8_state_dict(function), before)
        raise ZeroDivisionError
    assert not moved(fp8_state_dict(function), before)


def test_gradients_buffers_and_random_numbers_are_left_as_they_were_by_a_capture_that_fails() -> None:
    module = torch.nn.Sequential(Layer(), torch.nn.Dropout(0.5))
    module.register_buffer("count", torch.zeros(1))
    function = thunder.jit(module, executors=[te_ex])
    layer = GraphedLayer(function, "callables[0]", delay_wgrad=False)
    step(function)
    grads, random = [p.grad for p in module.parameters()], torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), left_as_they_were([layer]):
        module.zero_grad()
        function(sample())
        module.count.add_(1)
        raise ZeroDivisionError
    assert all(p.grad is grad for p, grad in zip(module.parameters(), grads)) and not module.count.any()
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("keep", (None, True))
def test_steps_after_are_those_of_a_function_that_had_not_run(keep) -> None:
    module = Layer().requires_grad_()
    one, other = (
        thunder.jit(m, executors=[te_ex], te_fp8_recipe=recipe(), te_weight_cache=keep)
        for m in (module, copy.deepcopy(module))
    )
    with fp8_state_kept(one):
        for _ in range(3):
            step(one)
    for _ in range(3):
        assert torch.equal(step(one), step(other))
        assert not moved(fp8_state_dict(one), fp8_state_dict(other))


def test_a_frozen_weight_is_saved_with_the_scale_that_it_is_quantized_with() -> None:
    one, other, resumed = (jitted(te_fp8_recipe=recipe()) for _ in range(3))
    with fp8_state_kept(one):
        step(one)
        step(one)
    for _ in range(2):
        step(other)
    names = {"frozen.weight.e4m3_4.scale"}
    assert names <= fp8_state_dict(one).keys() and not names & moved(fp8_state_dict(one), fp8_state_dict(other))
    step(one)
    thunder_te_exec.load_fp8_state_dict(resumed, fp8_state_dict(one))
    assert torch.equal(step(one), step(resumed))


def test_a_strict_load_that_did_not_fit_still_does_not_fit_after() -> None:
    one, other = jitted(te_fp8_recipe=recipe()), jitted(te_fp8_recipe=recipe())
    step(one)
    saved = fp8_state_dict(one)
    thunder_te_exec.load_fp8_state_dict(
        other, {name: t for name, t in saved.items() if not name.startswith("trained.input")}
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="trained.input"), fp8_state_kept(other):
            step(other)
    with pytest.raises(ValueError, match="trained.input"):
        step(other)


def test_state_that_waits_to_be_loaded_is_there_for_the_first_call_after() -> None:
    one, other = jitted(te_fp8_recipe=recipe()), jitted(te_fp8_recipe=recipe())
    step(one)
    saved = fp8_state_dict(one)
    thunder_te_exec.load_fp8_state_dict(other, saved)
    with fp8_state_kept(other):
        step(other)
    assert moved(fp8_state_dict(other), saved) <= {"frozen.weight.e4m3_4.amax_history"}
