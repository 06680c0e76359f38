"""Recipes: which one is in force, that every field of it counts, and that what is not supported says so."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import thunder
import torch
from thunder_te_exec import autocast, te_ex
from thunder_te_exec import recipe as recipes
from thunder_te_exec import recipe_classes
from thunder_te_exec.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams
from torch import nn

torch.manual_seed(0)
LINEAR = nn.Linear(32, 32, bias=False)
INPUTS = [torch.randn(32, 32) * 3.0**step for step in range(4)]


def outputs(recipe=None, *, context=None, inputs=INPUTS) -> list[torch.Tensor]:
    compiled = thunder.jit(LINEAR, executors=[te_ex], **({"te_fp8_recipe": recipe} if recipe is not None else {}))
    found = []
    for x in inputs:
        if context is None:
            found.append(compiled(x).detach())
        else:
            with autocast(recipe=context):
                found.append(compiled(x).detach())
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_delayed_scaling_is_the_default_of_the_cpu() -> None:
    assert same(outputs(), outputs(DelayedScaling()))
    assert not same(outputs(), outputs(Float8CurrentScaling()))


def test_a_context_gives_its_recipe_and_wins_over_the_option() -> None:
    current = outputs(Float8CurrentScaling())
    assert same(outputs(context=Float8CurrentScaling()), current)
    assert same(outputs(DelayedScaling(), context=Float8CurrentScaling()), current)


def delayed_with(**fields) -> DelayedScaling:
    recipe = DelayedScaling()
    for name, value in fields.items():
        setattr(recipe, name, value)
    return recipe


def current_with(**fields) -> Float8CurrentScaling:
    recipe = Float8CurrentScaling()
    for name, value in fields.items():
        setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(
    "recipe, other",
    [
        (DelayedScaling(margin=2), DelayedScaling()),
        (DelayedScaling(amax_history_len=1), DelayedScaling(amax_history_len=3)),
        (DelayedScaling(amax_compute_algo="most_recent"), DelayedScaling()),
        (DelayedScaling(amax_compute_algo=lambda history: history[0] * 8), DelayedScaling()),
        (DelayedScaling(amax_compute_algo=lambda history: history[0]), DelayedScaling()),
        (DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, fp8_max, recipe: scale * 3), DelayedScaling()),
        (current_with(fp8_quant_fwd_inp=QParams(power_2_scale=True)), Float8CurrentScaling()),
        (current_with(fp8_quant_fwd_weight=QParams(power_2_scale=True)), Float8CurrentScaling()),
        (current_with(fp8_quant_fwd_weight=QParams(amax_epsilon=100.0)), Float8CurrentScaling()),
    ],
)
def test_every_field_counts(recipe, other) -> None:
    # INPUTS grow: the largest and the most recent amax of a history agree unless a later one is smaller.
    inputs = [*INPUTS, INPUTS[0], INPUTS[0] * 1.01]
    assert not same(outputs(recipe, inputs=inputs), outputs(other, inputs=inputs))


def test_functions_of_the_user_get_the_history_and_the_old_scale() -> None:
    seen = []

    def algo(history):
        seen.append(history.clone())
        return history.amax(0)

    def factor(amax, scale, fp8_max, recipe):
        seen.append((amax.clone(), scale.clone(), fp8_max, recipe.margin))
        return fp8_max / amax

    recipe = DelayedScaling(amax_history_len=5, amax_compute_algo=algo, scaling_factor_compute_algo=factor)
    outputs(recipe)
    history, (amax, scale, fp8_max, margin) = seen[:2]
    assert history.shape == (5, 2) and scale.tolist() == [1.0, 1.0] and fp8_max == 448.0 and margin == 0
    assert amax.tolist() == [INPUTS[0].abs().max().item(), LINEAR.weight.abs().max().item()]


class Custom(recipes.Recipe):
    """A recipe that nobody knows."""


@pytest.mark.parametrize(
    "recipe, error, match",
    [
        ("delayed", TypeError, "FP8 recipe: expected an instance, such as .* got 'delayed' of type str"),
        (DelayedScaling, TypeError, "got <class .*DelayedScaling'> of type type"),
        (Custom(), NotImplementedError, "recipe Custom is not supported"),
        (DelayedScaling(fp8_dpa=True), NotImplementedError, "DelayedScaling.fp8_dpa=True"),
        (DelayedScaling(fp8_mha=True), NotImplementedError, "DelayedScaling.fp8_mha=True"),
        (delayed_with(fp8_format="HYBRID"), ValueError, "DelayedScaling.fp8_format='HYBRID'"),
        (delayed_with(scaling_factor_compute_algo="x"), ValueError, "scaling_factor_compute_algo='x'"),
        (delayed_with(margin=200), ValueError, "DelayedScaling.margin=200"),
        (delayed_with(reduce_amax="no"), ValueError, "DelayedScaling.reduce_amax='no'"),
        (current_with(fp8_gemm_dgrad=True), ValueError, "fp8_gemm_dgrad=True: expected .* MMParams"),
        (current_with(fp8_quant_fwd_inp=None), ValueError, "fp8_quant_fwd_inp=None: expected an instance of QParams"),
        (current_with(fp8_format=Format.E5M2), ValueError, "fp8_format=.*E5M2.*: expected Format.E4M3"),
        (DelayedScaling(amax_history_len=0), ValueError, "DelayedScaling.amax_history_len=0"),
        (current_with(backward_override="dequantized"), NotImplementedError, "backward_override='dequantized'"),
        (current_with(use_power_2_scales=True), NotImplementedError, "use_power_2_scales=True has no effect"),
    ],
)
def test_what_is_not_supported_raises_when_compiling_by_name(recipe, error, match) -> None:
    compiled = thunder.jit(LINEAR, executors=[te_ex], te_fp8_recipe=recipe)
    with pytest.raises(error, match=match):
        compiled(INPUTS[0])


def test_an_algorithm_that_does_not_exist_raises_by_name() -> None:
    recipe = DelayedScaling()
    recipe.amax_compute_algo = "median"
    with pytest.raises(ValueError, match="DelayedScaling.amax_compute_algo='median'"):
        outputs(recipe)


def test_pure_e5m2_is_refused_as_by_transformer_engine() -> None:
    for recipe in (DelayedScaling, Float8CurrentScaling):
        with pytest.raises(AssertionError, match="Pure E5M2 training is not supported"):
            recipe(fp8_format=Format.E5M2)


CONTEXTS = {
    "delayed": lambda: autocast(recipe=DelayedScaling(amax_history_len=2)),
    "delayed with a margin": lambda: autocast(recipe=DelayedScaling(amax_history_len=2, margin=1)),
    "current": lambda: autocast(recipe=Float8CurrentScaling()),
    "not enabled": lambda: autocast(enabled=False),
    "none": contextlib.nullcontext,
}


def steps(compiled, linear: nn.Linear, contexts: list[str]) -> dict[str, list[torch.Tensor]]:
    """Outputs and gradients of one step under each of ``contexts``, in turn; backward runs outside of all."""
    found: dict[str, list[torch.Tensor]] = {}
    for n, name in enumerate(contexts):
        x = (INPUTS[n % 4] + n).requires_grad_()
        linear.weight.grad = None
        with CONTEXTS[name]():
            y = compiled(x)
        y.backward(torch.full_like(y, 1.0 + n))
        found.setdefault(name, []).extend((y.detach(), x.grad, linear.weight.grad))
    return found


@pytest.mark.parametrize("name", CONTEXTS)
def test_under_every_context_a_compiled_function_does_what_one_compiled_there_does(name) -> None:
    order = ["delayed", "current", "not enabled", "none", "delayed with a margin"] * 3
    linear = nn.Linear(32, 32, bias=False)
    everywhere = steps(thunder.jit(linear, executors=[te_ex]), linear, order)[name]
    only_here = thunder.jit(linear, executors=[te_ex])
    alone = []
    for n, context in enumerate(order):
        if context == name:
            x = (INPUTS[n % 4] + n).requires_grad_()
            linear.weight.grad = None
            with CONTEXTS[name]():
                y = only_here(x)
                y.backward(torch.full_like(y, 1.0 + n))
            alone += [y.detach(), x.grad, linear.weight.grad]
    if "delayed" not in name and name != "none":  # delayed scaling shares its scales between contexts
        assert same(everywhere, alone)
    if name == "not enabled":
        assert torch.equal(everywhere[0], linear(INPUTS[2] + 2))


def test_a_context_is_compiled_for_once() -> None:
    compiled = thunder.jit(LINEAR, executors=[te_ex])
    for _ in range(3):
        for context in CONTEXTS.values():
            with context():
                compiled(INPUTS[0])
    assert len(thunder.compile_stats(compiled).interpreter_cache) == len(CONTEXTS)


def test_delayed_scalings_scales_survive_a_step_under_another_recipe() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    compiled, steady = (thunder.jit(LINEAR, executors=[te_ex], te_fp8_recipe=recipe) for _ in range(2))
    for x in INPUTS:
        with autocast(recipe=Float8CurrentScaling()):
            compiled(x * 100)
        assert torch.equal(compiled(x), steady(x))


def test_a_recipe_that_is_changed_is_another_recipe() -> None:
    recipe = DelayedScaling()
    compiled = thunder.jit(LINEAR, executors=[te_ex], te_fp8_recipe=recipe)
    compiled(INPUTS[0])
    recipe.margin = 3
    compiled(INPUTS[0])
    assert len(thunder.compile_stats(compiled).interpreter_cache) == 2


def test_another_process_group_is_compiled_for_again() -> None:
    compiled = thunder.jit(LINEAR, executors=[te_ex])
    for group in (None, "group a", "group b", "group a", None):
        with autocast(amax_reduction_group=group):
            compiled(INPUTS[0])
    assert len(thunder.compile_stats(compiled).interpreter_cache) == 3


def test_a_context_inside_a_jitted_function_raises() -> None:
    def f(x, w):
        with autocast(enabled=False):
            return nn.functional.linear(x, w)

    with pytest.raises(Exception, match="autocast inside a jitted function has no effect"):
        thunder.jit(f, executors=[te_ex])(INPUTS[0], LINEAR.weight)


def test_a_context_that_is_neither_enabled_nor_disabled_raises() -> None:
    with pytest.raises(TypeError, match=r"autocast\(enabled='no'\): expected True or False"), autocast(enabled="no"):
        pass


def test_a_recipe_that_restates_a_default_is_the_same_recipe() -> None:
    compiled = thunder.jit(LINEAR, executors=[te_ex])
    for recipe in (Float8CurrentScaling(), current_with(fp8_quant_fwd_inp=QParams())):
        with autocast(recipe=recipe):
            compiled(INPUTS[0])
    assert len(thunder.compile_stats(compiled).interpreter_cache) == 1


def test_an_equal_recipe_object_is_the_same_recipe() -> None:
    compiled = thunder.jit(LINEAR, executors=[te_ex])
    for x in INPUTS:
        with autocast(recipe=DelayedScaling(amax_history_len=8)):
            compiled(x)


def test_contexts_nest_and_the_innermost_holds() -> None:
    from thunder_te_exec.autocast import active_context

    outer, inner = DelayedScaling(), Float8CurrentScaling()
    assert active_context() is None
    with autocast(recipe=outer):
        with autocast(enabled=False), autocast(recipe=inner):
            assert active_context().enabled and active_context().recipe is inner
        assert active_context().recipe is outer
    assert active_context() is None


def test_own_recipe_classes_have_the_fields_and_defaults_of_transformer_engine_2_20() -> None:
    delayed = {f.name: f.default for f in dataclasses.fields(recipe_classes.DelayedScaling)}
    assert delayed == {
        "margin": 0,
        "fp8_format": recipe_classes.Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    current = recipe_classes.Float8CurrentScaling()
    assert not current.fp8_gemm_fprop.use_split_accumulator and current.fp8_gemm_dgrad.use_split_accumulator
    assert current.fp8_gemm_wgrad == MMParams() and current.fp8_quant_bwd_grad == QParams()
