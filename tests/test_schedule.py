"""The order in which a pipeline's graphs are captured, and the schedules that are none."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thunder_te_exec.schedule import Replays, Schedule

INTERLEAVED = [1, 1, 2, 2, -2, 1, -2, 1, -1, 2, -1, 2, -2, -2, -1, -1]


def delayed(order: list[float]) -> list[float]:
    """``order`` with the weight gradients of each backward right after it."""
    return [entry for c in order for entry in ((c,) if c > 0 else (c, c - 0.5))]


@st.composite
def schedules(draw) -> tuple[list[float], list[int], int]:
    """An order with weight gradients, how many layers its chunks have, and how many microbatches there are."""
    chunks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layers = [draw(st.integers(1, 3)) for _ in range(chunks)]
    done = {c: [0, 0, 0] for c in range(1, chunks + 1)}  # forwards, backwards, weight gradients
    order: list[float] = []
    while len(order) < chunks * microbatches * 3:
        possible = [(c, 0) for c, (f, _, _) in done.items() if f < microbatches]
        possible += [(c, 1) for c, (f, b, w) in done.items() if b < f and w == b]
        possible += [(c, 2) for c, (_, b, w) in done.items() if w < b]
        c, kind = draw(st.sampled_from(possible))
        done[c][kind] += 1
        order.append((c, -c, -c - 0.5)[kind])
    return order, layers, microbatches


def test_parameters_follow_chunk_microbatch_and_layer() -> None:
    schedule = Schedule.of(INTERLEAVED, 5, 20, [2, 3], delay_wgrad=False)
    assert schedule.callables() == [0, 1] * 4 + [2, 3, 4] * 4


@given(schedules())
def test_every_order_that_could_run_is_a_schedule(found) -> None:
    order, layers, microbatches = found
    callables = sum(layers)
    schedule = Schedule.of(order, callables, callables * microbatches, layers, delay_wgrad=True)
    assert schedule.microbatches == microbatches
    without = [entry for entry in order if entry == int(entry)]
    assert Schedule.of(without, callables, callables * microbatches, layers, delay_wgrad=False).order == tuple(without)


@given(schedules(), st.data())
def test_by_layer_runs_the_same_work_in_the_same_order(found, data) -> None:
    order, layers, microbatches = found
    waits = [data.draw(st.booleans()) for _ in range(sum(layers))]
    schedule = Schedule.of(order, sum(layers), sum(layers) * microbatches, layers, delay_wgrad=True)
    by_layer = schedule.by_layer(waits)
    first = [sum(layers[:c]) + 1 for c in range(len(layers))]
    expected: list[float] = []
    for entry in order:
        c = int(abs(entry)) - 1
        own = list(range(first[c], first[c] + layers[c]))
        if entry > 0:
            expected += own
        elif entry == int(entry):
            expected += [-layer for layer in own[::-1]]
        else:
            expected += [-layer - 0.5 for layer in own[::-1] if waits[layer - 1]]
    assert list(by_layer.order) == expected and set(by_layer.layers) == {1}


@given(schedules())
def test_places_by_layer_name_the_same_layer_and_microbatch(found) -> None:
    order, layers, microbatches = found
    schedule = Schedule.of(order, sum(layers), sum(layers) * microbatches, layers, delay_wgrad=True)
    mine = counted(schedule.callables())
    by_layer = counted(schedule.by_layer([True] * sum(layers)).callables())
    assert [mine[i] for i in schedule.places_by_layer()] == by_layer


def counted(callables: list[int]) -> list[tuple[int, int]]:
    """Each callable with how often it came before."""
    seen: dict[int, int] = {}
    found = []
    for layer in callables:
        found.append((layer, seen.get(layer, 0)))
        seen[layer] = seen.get(layer, 0) + 1
    return found


@pytest.mark.parametrize(
    ("order", "delay_wgrad", "message"),
    (
        ([], False, "order: expected a forward and a backward of each chunk and microbatch, got no entry"),
        ([1, -1, 2], False, "as many forwards as backwards"),
        ([1, 1, -1, 2, -2], False, "as many forwards as backwards"),
        ([1, -1, 3, -3], False, "as many forwards as backwards"),
        ([-1, 1], False, "order[0] = -1: no forward of chunk 1 is left"),
        ([1, -1, -1.5], False, "expected none with delay_wgrad=False"),
        ([1, -1], True, "1 entries -c - 0.5"),
        ([1, -1.5, -1], True, "order[1] = -1.5: no backward of chunk 1"),
        # Transformer Engine lets it pass, and captures one graph twice
        ([1, 1, -1, -1, -1.5, -1.5], True, "order[3] = -1: the weight gradients of the chunk's backward before"),
        ([1, -1, -1.25], True, "order[2]: expected c, -c or -c - 0.5"),
        ([1.5, -1], False, "order[0]: expected c, -c or -c - 0.5"),
        ([0, 1, -1], False, "order[0]: expected c, -c or -c - 0.5"),
        ([-0.5, 1, -1], True, "order[0]: expected c, -c or -c - 0.5"),
    ),
)
def test_what_is_no_schedule_is_refused_with_the_place(order, delay_wgrad, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule.of(order, 2, 2, None, delay_wgrad)


@pytest.mark.parametrize("entry", ("1", None, True, float("nan"), float("inf")))
def test_an_entry_that_is_no_number_is_refused(entry) -> None:
    with pytest.raises((TypeError, ValueError), match=r"order\[1\]: expected c, -c or -c - 0.5"):
        Schedule.of([1, entry, -1], 1, 1, None, False)


@pytest.mark.parametrize("order", (7, "1", None))
def test_what_is_no_list_is_refused(order) -> None:
    with pytest.raises(TypeError, match="order: expected a list of numbers"):
        Schedule.of(order, 1, 1, None, False)


def test_whole_floats_are_entries_too() -> None:
    order = Schedule.of([1.0, -1.0], 1, 1, None, False).order
    assert order == (1, -1) and all(isinstance(entry, int) for entry in order)


@given(schedules(), st.data())
def test_replays_are_the_captures_by_layer_in_the_callers_places(found, data) -> None:
    order, layers, microbatches = found
    waits = [data.draw(st.booleans()) for _ in range(sum(layers))]
    schedule = Schedule.of(order, sum(layers), sum(layers) * microbatches, layers, delay_wgrad=True)
    # By layer, each chunk is a layer: the n-th entry of a kind is that of microbatch n.
    place = dict(zip(counted(schedule.callables()), range(sum(layers) * microbatches), strict=True))
    seen: dict[float, int] = {}
    expected = []
    for entry in schedule.by_layer(waits).order:
        n = seen[entry] = seen.get(entry, -1) + 1
        kind = "forward" if entry > 0 else "weight gradients" if entry % 1 else "backward"
        expected.append((kind, place[int(abs(entry)) - 1, n]))
    assert schedule.replays([True] * sum(layers), waits) == expected


def test_numbers_that_do_not_fit_the_schedule_are_named() -> None:
    order = [1, 2, -2, -1]
    with pytest.raises(ValueError, match="callables: expected a multiple of 2, the order's chunks, got 3"):
        Schedule.of(order, 3, 3, None, False)
    with pytest.raises(ValueError, match=r"num_layers_per_chunk: expected 2 positive numbers.*sum to 3.*got \[1, 1\]"):
        Schedule.of(order, 3, 3, [1, 1], False)
    with pytest.raises(
        ValueError, match="sample_args: expected 4, one for each of 4 callables and 1 microbatches, got 5"
    ):
        Schedule.of(order, 4, 5, None, False)


def replays() -> Replays:
    """Of two graphs without a schedule."""
    return Replays([("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)])


def test_steps_in_the_order_of_the_capture_and_with_graphs_left_out_are_replayed() -> None:
    order = replays()
    for _ in range(3):
        first, second = order.forward(0), order.forward(1)
        order.backward(1, second)
        order.backward(0, first)
    number = order.forward(0)
    order.backward(0, number)
    for _ in range(3):  # evaluation
        order.forward(0)
        order.forward(1)


def test_a_backward_of_a_forward_that_was_replayed_again_since_is_refused() -> None:
    order = replays()
    first = order.forward(0)
    second = order.forward(0)
    with pytest.raises(RuntimeError, match="the backward of sample 0 replayed out of the order"):
        order.backward(0, first)
    order.backward(0, second)
    with pytest.raises(RuntimeError, match="or twice"):
        order.backward(0, second)


def test_a_backward_after_one_that_was_captured_later_is_refused() -> None:
    order = replays()
    first, second = order.forward(0), order.forward(1)
    order.backward(0, first)
    with pytest.raises(RuntimeError, match="the backward of sample 1"):
        order.backward(1, second)


def test_a_forward_out_of_order_loses_what_is_under_way() -> None:
    order = Replays(Schedule.of([1, 1, -1, -1], 1, 2, None, False).replays([True], [False]))
    first, second = order.forward(0), order.forward(1)
    order.backward(0, first)
    order.forward(0)
    with pytest.raises(RuntimeError, match="sample 1"):
        order.backward(1, second)


def test_weight_gradients_keep_their_place_in_a_schedule() -> None:
    order = Replays(Schedule.of([1, 1, -1, -1.5, -1, -1.5], 1, 2, None, True).replays([True], [True]))
    first, second = order.forward(0), order.forward(1)
    order.backward(0, first)
    order.backward(1, second)
    with pytest.raises(RuntimeError, match="the weight gradients of sample 0"):
        order.wgrad(0, first)
    order.wgrad(1, second)
