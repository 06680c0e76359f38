"""jit_blocks: repeated blocks are traced once, with the numbers of ``thunder.jit`` of the whole model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import thunder
import torch
from block_model import SOME_RECIPES, Adapted, Block, Model, jitted_by, tokens, train
from steps import same
from thunder.core import jit_ext
from thunder_te_exec import autocast, claims, fp8_state_dict, jit_blocks, load_fp8_state_dict, quantize_frozen_, te_ex
from thunder_te_exec.alike import description_of, first_difference
from thunder_te_exec.recipe import Float8CurrentScaling
from torch import nn


@contextmanager
def counted(monkeypatch) -> Iterator[list[str]]:
    """The classes of what thunder traces."""
    traced: list[str] = []
    trace = thunder.thunder_general_jit

    def counting(fn, *args, **kwargs):
        traced.append(type(fn).__name__)
        return trace(fn, *args, **kwargs)

    assert trace is jit_ext.thunder_general_jit
    with monkeypatch.context() as patch:
        patch.setattr(thunder, "thunder_general_jit", counting)
        yield traced


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("recipe", SOME_RECIPES)
def test_steps_have_the_bits_of_the_whole_model_jitted(recipe, dtype) -> None:
    whole, blocks = (jitted_by(jit, recipe, Model().to(dtype)) for jit in (thunder.jit, jit_blocks))
    assert same(train(whole), train(blocks))
    assert {c.weight for c in claims(whole) if c.claimed} == {c.weight for c in claims(blocks) if c.claimed}
    a, b = fp8_state_dict(whole), fp8_state_dict(blocks)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert len(a) > 1 or recipe != "delayed"


def test_blocks_that_are_alike_are_traced_once(monkeypatch) -> None:
    model = jitted_by(jit_blocks, model=Model(5))
    with counted(monkeypatch) as traced, warnings.catch_warnings():
        warnings.filterwarnings("error", message="jit_blocks")
        train(model, steps=2)
    assert sorted(traced) == ["Block", "Embedding", "Linear", "RMSNorm"]
    with counted(monkeypatch) as traced, torch.no_grad():
        model(tokens(0))
    assert sorted(traced) == ["Block", "Embedding", "Linear", "RMSNorm"]
    with counted(monkeypatch) as traced, autocast(recipe=Float8CurrentScaling()):
        model(tokens(0))
    assert sorted(traced) == ["Block", "Linear"]


def check_traced_once(models: list[Model], monkeypatch, recipe: str = "delayed", **options) -> None:
    """jit_blocks of the second of two equal models traces one block, and trains as thunder.jit of the first does."""
    whole = jitted_by(thunder.jit, recipe, models[0])
    blocks = jitted_by(jit_blocks, recipe, models[1], **options)
    with counted(monkeypatch) as traced:
        found = train(blocks, steps=2)
    assert traced.count("Block") == 1
    assert same(train(whole, steps=2), found)


class OtherBlock(Block):
    bias = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.bias


def scaled(module, args, output):
    return output * 0.5


def replace(name: str, value) -> Callable[[Block], None]:
    return lambda block: setattr(block, name, value)


#: What makes the second block another one than the first, and what jit_blocks calls it.
DIFFERENCES: dict[str, tuple[Callable[[Block], object], str]] = {
    "frozen": (lambda b: b.o.requires_grad_(False), "o.weight"),
    "unfrozen": (lambda b: b.q.base.requires_grad_(True), "q.base.weight"),
    "no bias": (lambda b: b.o.register_parameter("bias", None), "o.bias"),
    "shape": (lambda b: (replace("q", Adapted(64))(b), replace("act", lambda x: x[..., ::2])(b)), "act"),
    "dtype of a buffer": (lambda b: replace("shift", b.shift.to(torch.float64).float().bfloat16())(b), "shift"),
    "float": (replace("factor", 3.0), "factor is 3.0, not 1.0"),
    "int": (replace("factor", 1), "factor is 1, not 1.0"),
    "not None": (replace("option", "x"), "option"),
    "function": (replace("act", torch.tanh), "act"),
    "unread number": (replace("layer_idx", 7), "layer_idx is there"),
    "dropout": (lambda b: replace("p", 1.0)(b.dropout), "dropout.p is 1.0, not 0.0"),
    "epsilon": (lambda b: replace("eps", 0.5)(b.norm), "norm.eps is 0.5"),
    "eval mode": (lambda b: b.dropout.eval(), "dropout.training is False"),
    "hook inside": (lambda b: b.q.register_forward_hook(scaled), "q._forward_hooks"),
    "tied": (lambda b: replace("lora_A", b.k.lora_A)(b.q), "class of k.lora_A"),
    "tied weight": (lambda b: replace("weight", b.k.lora_A.weight)(b.q.lora_A), "k.lora_A.weight"),
    "class": (lambda b: replace("__class__", nn.Identity)(b.dropout), "class of dropout"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_block_that_differs_is_compiled_by_itself_and_says_why(what, monkeypatch) -> None:
    change, name = DIFFERENCES[what]
    models = [Model(), Model()]
    for model in models:
        torch.manual_seed(1)
        change(model.layers[1])
    whole, blocks = jitted_by(thunder.jit, model=models[0]), jitted_by(jit_blocks, model=models[1])
    with counted(monkeypatch) as traced, pytest.warns(UserWarning, match="layers.1 is compiled by itself") as warned:
        found = train(blocks, steps=2)
    assert traced.count("Block") == 2
    assert any(f": {name}" in str(w.message) for w in warned), [str(w.message) for w in warned]
    # It points at the call of the model, not into the package.
    assert {Path(w.filename).name for w in warned if "by itself" in str(w.message)} == {"block_model.py"}
    assert same(train(whole, steps=2), found)


def inner_function():
    return lambda x: x


#: What peft and LitGPT leave in their modules, other in each, that no program reads.
LIKENESSES: dict[str, Callable[[Block, int], object]] = {
    "own name": lambda b, i: replace("kwargs", {"target_name": f"layers.{i}.q", "list": [f"layers.{i}"]})(b.q),
    "hooks of one function": lambda b, i: b.q.register_forward_hook(scaled),
    "hooks of the state_dict": lambda b, i: b.q.register_state_dict_post_hook(lambda *_: None),
    "functions of one code": lambda b, i: replace("lora_dropout", inner_function())(b.q),
}


@pytest.mark.parametrize("what", LIKENESSES)
def test_blocks_that_no_program_tells_apart_are_traced_once(what, monkeypatch) -> None:
    models = [Model(), Model()]
    for model in models:
        for i, layer in enumerate(model.layers):
            LIKENESSES[what](layer, i)
    check_traced_once(models, monkeypatch)


def test_blocks_whose_frozen_weights_are_held_in_fp8_are_traced_once(monkeypatch) -> None:
    models = [Model(3), Model(3)]
    for model in models:
        quantize_frozen_(model, SOME_RECIPES["current"]())
    check_traced_once(models, monkeypatch, "current")


def test_what_is_to_be_ignored_is_checked() -> None:
    with pytest.raises(TypeError, match=r"ignore='layer_idx': expected a list of names of attributes"):
        jit_blocks(Model(), ignore="layer_idx", executors=[te_ex])
    with pytest.raises(ValueError, match="no module of the model has an attribute 'layer_ix'"):
        jit_blocks(Model(), ignore=["layer_ix"], executors=[te_ex])


def test_the_traces_of_a_block_are_those_of_its_forward() -> None:
    model = jitted_by(jit_blocks)
    model(tokens(0)).sum().backward()
    for layer in model.layers:
        assert "te_linear_0" in str(thunder.last_traces(layer.forward)[-1])
        assert "te_functional_linear_backward" in str(thunder.last_backward_traces(layer.forward)[-1])


def test_an_attribute_that_is_to_be_ignored_tells_no_blocks_apart(monkeypatch) -> None:
    models = [Model(3), Model(3)]
    for model in models:
        for i, layer in enumerate(model.layers):
            layer.layer_idx = layer.dropout.layer_idx = i
    check_traced_once(models, monkeypatch, ignore=["layer_idx"])


def test_names_that_are_not_a_blocks_own_and_functions_over_other_values_are_told_apart() -> None:
    def over(value: float) -> Callable:
        return lambda x: x * value

    for name, values in {
        "set": ({"layers.0"}, {"layers.1"}),
        "kwargs": ({"of": "layers.1.q"}, {"of": "layers.0.q"}),
        "act": (over(2.0), over(3.0)),
        "list": ([1.0], [2.0]),
    }.items():
        block = Block()
        descriptions = []
        for i, value in enumerate(values):
            setattr(block, name, value)
            descriptions.append(description_of(block, f"layers.{i}"))
        assert first_difference(*descriptions).startswith(f"{name} is ")


def test_a_buffer_that_the_first_run_makes_is_each_blocks_own() -> None:
    models = [Model(), Model()]
    for model in models:
        for layer in model.layers:
            layer.__class__ = Lazy
            layer.register_buffer("made", None, persistent=False)
    whole, blocks = jitted_by(thunder.jit, model=models[0]), jitted_by(jit_blocks, model=models[1])
    assert same(train(whole, steps=2), train(blocks, steps=2))
    first, second = (layer.made for layer in blocks.layers)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


class Lazy(Block):
    """Makes a buffer when it first runs, as LitGPT's q, k and v with adapters do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.made is None:
            self.made = torch.full((32,), 0.5)
        return super().forward(x) + self.made


def test_a_block_of_another_class_is_compiled_by_itself(monkeypatch) -> None:
    models = [Model(3), Model(3)]
    for model in models:
        model.layers[1].__class__ = OtherBlock
    whole, blocks = jitted_by(thunder.jit, model=models[0]), jitted_by(jit_blocks, model=models[1])
    with counted(monkeypatch) as traced:
        found = train(blocks, steps=2)
    assert traced.count("Block") == 1 and traced.count("OtherBlock") == 1
    assert same(train(whole, steps=2), found)


def test_a_value_that_changes_between_two_blocks_compilations_is_not_shared() -> None:
    model = jitted_by(jit_blocks)
    reference = jitted_by(jit_blocks)
    for m in (model, reference):
        m.layers[1].factor = 2.0
    h = torch.randn(2, 16, 32)
    model.layers[0](h)
    model.layers[0].factor = 2.0  # what was compiled of it had another one
    with pytest.warns(UserWarning, match="layers.1 is compiled by itself"):
        found = model.layers[1](h)
    assert torch.equal(found, reference.layers[1](h))


def test_a_hook_on_a_block_runs_once_and_needs_no_compilation(monkeypatch) -> None:
    models = [Model(), Model()]
    for model in models:
        model.layers[1].register_forward_hook(scaled)
    check_traced_once(models, monkeypatch)


def test_a_block_that_is_unfrozen_between_steps_is_compiled_by_itself_and_keeps_its_scales(monkeypatch) -> None:
    def unfreeze(model: nn.Module, step: int) -> None:
        if step == 2:
            model.layers[1].q.base.requires_grad_(True)

    whole, blocks = jitted_by(thunder.jit), jitted_by(jit_blocks)
    with counted(monkeypatch) as traced, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = train(blocks, before=unfreeze)
    assert traced.count("Block") == 2
    assert same(train(whole, before=unfreeze), found)


def test_te_filter_gets_full_names_and_blocks_that_it_tells_apart_are_not_shared(monkeypatch) -> None:
    names = set()

    def te_filter(name: str, shape: tuple[int, ...]) -> bool:
        names.add(name)
        return "lora" not in name and name != "layers.1.o.weight"

    whole, blocks = (jitted_by(jit, te_filter=te_filter) for jit in (thunder.jit, jit_blocks))
    expected = train(whole, steps=2)
    asked = set(names)
    names.clear()
    with counted(monkeypatch) as traced:
        assert same(expected, train(blocks, steps=2))
    assert names == asked and "layers.1.o.weight" in names
    assert traced.count("Block") == 2
    (claim,) = (c for c in claims(blocks) if c.weight == "layers.1.o.weight")
    assert claim.reason == "te_filter returned False"


@pytest.mark.parametrize("called_before", (False, True), ids=("before the first call", "after a call"))
@pytest.mark.parametrize("of,to", ((thunder.jit, jit_blocks), (jit_blocks, thunder.jit)), ids=("to blocks", "to whole"))
def test_fp8_state_of_the_whole_model_and_of_its_blocks_loads_into_the_other(of, to, called_before) -> None:
    first = jitted_by(of)
    train(first, steps=3)
    state = fp8_state_dict(first)
    second = jitted_by(to)
    second.load_state_dict(first.state_dict())
    if called_before:
        second(tokens(9)).sum().backward()
        second.zero_grad()
    load_fp8_state_dict(second, state)
    assert same(train(first), train(second))


def test_fp8_state_that_does_not_fit_is_named_and_nothing_is_changed() -> None:
    model = jitted_by(jit_blocks)
    train(model, steps=1)
    before = fp8_state_dict(model)
    state = dict(before)
    key = next(name for name in state if name.startswith("layers.1.o.input") and name.endswith("scale"))
    state["layers.7.o.input.e4m3_3.scale"] = state.pop(key)
    with pytest.raises(ValueError, match=f"missing: {key}; unexpected: layers.7.o"):
        load_fp8_state_dict(model, state)
    for fresh in (jitted_by(jit_blocks), jitted_by(thunder.jit)):
        with pytest.raises(ValueError, match="unexpected: layers.7.o.input.e4m3_3.scale"):
            load_fp8_state_dict(fresh, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp8_state_dict(model).items())


def test_what_is_returned_is_the_model_to_torch_and_the_model_stays_eager() -> None:
    model = Model()
    eager = model(tokens(0))
    blocks = jitted_by(jit_blocks, model=model)
    assert type(blocks) is Model and [n for n, _ in blocks.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(blocks.parameters(), model.parameters()))
    assert blocks.state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(blocks(tokens(0)), eager) and torch.equal(model(tokens(0)), eager)


def test_modes_types_and_tensors_that_change_are_followed() -> None:
    def change(model: nn.Module, step: int) -> None:
        if step == 1:
            model.eval()
        if step == 2:
            model.train()
            weights = {name: t.clone() * 0.5 for name, t in model.state_dict().items()}
            model.load_state_dict(weights)

    models = [Model(), Model()]
    for model in models:
        for layer in model.layers:
            layer.dropout.p = 1.0
    whole, blocks = jitted_by(thunder.jit, model=models[0]), jitted_by(jit_blocks, model=models[1])
    assert same(train(whole, before=change), train(blocks, before=change))
    blocks.load_state_dict({name: t.bfloat16() for name, t in blocks.state_dict().items()}, assign=True)
    fresh = jitted_by(jit_blocks, "current", copy.deepcopy(models[1]).bfloat16())
    fresh.load_state_dict(blocks.state_dict())
    with autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(blocks(tokens(0)), fresh(tokens(0)))
    blocks.layers[1].shift = torch.ones(32, dtype=torch.bfloat16)
    fresh.layers[1].shift.fill_(1)
    with autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(blocks(tokens(0)), fresh(tokens(0)))


def test_a_model_without_blocks_is_compiled_as_one(monkeypatch) -> None:
    def module() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    found = []
    for jit in (thunder.jit, jit_blocks):
        model = jitted_by(jit, model=module())
        with counted(monkeypatch) as traced:
            y = model(torch.arange(512.0).view(16, 32).sin())
        y.sum().backward()
        assert traced == ["Sequential"]
        found.append([y.detach(), *(p.grad for p in model.parameters()), *fp8_state_dict(model).values()])
    assert same(*found)


class Pairs(nn.Module):
    """Blocks that are lists of modules themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList((nn.RMSNorm(32), nn.Linear(32, 32))) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in self.layers:
            x = x + linear(norm(x))
        return x


def test_blocks_that_are_lists_of_modules_are_compiled_by_their_elements(monkeypatch) -> None:
    model, whole = jitted_by(jit_blocks, model=Pairs()), jitted_by(thunder.jit, model=Pairs())
    x = torch.randn(16, 32, requires_grad=True)
    with counted(monkeypatch) as traced:
        found = model(x)
    assert sorted(traced) == ["Linear", "RMSNorm"] and torch.equal(found, whole(x))


def test_a_head_that_is_tied_to_the_embedding_is_as_in_the_whole_model() -> None:
    models = [Model(), Model()]
    for model in models:
        model.head.weight = model.embed.weight
        model.embed.weight.data *= 0.1
    whole, blocks = jitted_by(thunder.jit, model=models[0]), jitted_by(jit_blocks, model=models[1])
    assert same(train(whole), train(blocks))
    assert fp8_state_dict(whole).keys() == fp8_state_dict(blocks).keys()


def test_what_cannot_be_compiled_by_blocks_is_refused_by_name() -> None:
    shared = Model()
    shared.layers[1].o.weight = shared.layers[0].o.weight
    with pytest.raises(ValueError, match="layers.0.o.weight and layers.1.o.weight are one parameter"):
        jitted_by(jit_blocks, model=shared)
    twice = Model()
    twice.layers[1] = twice.layers[0]
    with pytest.raises(ValueError, match="layers.0.norm.weight and layers.1.norm.weight are one parameter"):
        jitted_by(jit_blocks, model=twice)
    patched = Model()
    patched.layers[1].forward = patched.layers[1].forward
    with pytest.raises(ValueError, match="'layers.1' has a forward of its own"):
        jitted_by(jit_blocks, model=patched)
    with pytest.raises(TypeError, match="not jitted, got ThunderModule"):
        jit_blocks(jitted_by(thunder.jit), executors=[te_ex])
    with pytest.raises(TypeError, match="not jitted, got Model"):
        jit_blocks(jitted_by(jit_blocks), executors=[te_ex])
    with pytest.raises(TypeError, match="not jitted, got function"):
        jit_blocks(lambda x: x, executors=[te_ex])
    with pytest.raises(NotImplementedError, match="transforms"):
        jit_blocks(Model(), executors=[te_ex], transforms=[object()])
    with pytest.raises(NotImplementedError, match="neither copied nor pickled"):
        copy.deepcopy(jitted_by(jit_blocks))


def test_the_first_step_of_many_blocks_takes_no_more_tracing_than_that_of_one(monkeypatch) -> None:
    with counted(monkeypatch) as one:
        train(jitted_by(jit_blocks, model=Model(2)), steps=1)
    with counted(monkeypatch) as many:
        train(jitted_by(jit_blocks, model=Model(12)), steps=1)
    assert sorted(many) == sorted(one)
