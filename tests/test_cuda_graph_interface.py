"""CUDA graphs where there is no CUDA device: what is checked, what traces look like, and what is said."""

from __future__ import annotations

import pytest
import thunder_te_exec  # noqa: F401  (before thunder)
import thunder
import torch
from pipeline import INTERLEAVED, Layer
from programs import every_even_linear_frozen
from thunder_te_exec import CUDAGraphTransform, fp8_state_dict, jit_blocks, make_graphed_callables, te_ex
from thunder_te_exec.checkpoint import fp8_state_kept
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
        ({"delay_wgrad": True}, r"callables\[0\]: jitted with te_delay_wgrad=False, and delay_wgrad=True"),
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
    with pytest.raises(ValueError, match=r"callables\[0\]: (trained|the module) has forward hooks"):
        make_graphed_callables(function, (sample(),))


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


def step(function) -> None:
    y = function(sample())
    y.backward(torch.ones_like(y))


@pytest.mark.parametrize("jit", (thunder.jit, jit_blocks), ids=("jit", "jit_blocks"))
def test_state_is_kept_of_linears_that_had_run_and_of_those_that_had_not(jit) -> None:
    model = torch.nn.Sequential(Layer())
    function = jit(model, executors=[te_ex], te_fp8_recipe=DelayedScaling(amax_history_len=4))
    with fp8_state_kept(function):
        step(function)
    fresh = fp8_state_dict(function)
    assert all(bool((t == 1).all()) for name, t in fresh.items() if name.endswith(".scale"))
    assert all(bool((t == 0).all()) for name, t in fresh.items() if name.endswith(".amax_history"))
    step(function)
    before = fp8_state_dict(function)
    with pytest.raises(ZeroDivisionError), fp8_state_kept(function):
        step(function)
        assert any(not torch.equal(t, before[name]) for name, t in fp8_state_dict(function).items())
        raise ZeroDivisionError
    assert all(torch.equal(t, before[name]) for name, t in fp8_state_dict(function).items())


def test_state_that_waits_to_be_loaded_is_there_for_the_first_call_after() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    one, other = jitted(te_fp8_recipe=recipe), jitted(te_fp8_recipe=recipe)
    step(one)
    saved = fp8_state_dict(one)
    thunder_te_exec.load_fp8_state_dict(other, saved)
    with fp8_state_kept(other):
        step(other)
    assert all(torch.equal(t, saved[name]) for name, t in fp8_state_dict(other).items())
