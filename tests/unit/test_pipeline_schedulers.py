from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.planning.building.choice import span_s
from tf_ooo.planning.choosing.plan import as_asked, policy_named
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.simulator import simulate, validate
from tf_ooo.rewriting.plan import plan

GOLDEN = Path(__file__).parents[1] / "golden"
ONE_STAGE = ["gpipe", "1f1b", "fast_forward", "zb_h1", "zb_h2", "zb_auto"]
BY_FORMULA = [*ONE_STAGE, "interleaved_1f1b", "modulo", "zb_interleaved"]
POLICIES = [*BY_FORMULA, "zb_search"]
FUSED = {"gpipe", "1f1b", "interleaved_1f1b"}


@pytest.mark.parametrize("name", BY_FORMULA)
def test_golden(name):
    """Three devices, five micro-batches, six layers with F, dO, dW of 3, 4, 2 s.

    TF_OOO_WRITE_GOLDEN=1 writes the files anew.
    """
    layers = [LayerCosts(3, 4, 2, activation_bytes=1)] * 6
    text = plan(layers=layers, schedule=name, devices=3, microbatches=5).to_text()
    path = GOLDEN / f"pipeline_{name}.txt"
    if os.environ.get("TF_OOO_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text
    assert Schedule.from_text(text).to_text() == text


seconds = st.floats(0.125, 8) | st.integers(1, 9).map(float)


@st.composite
def problems(draw, most_layers=12):
    devices = draw(st.integers(1, 5))
    count = draw(st.integers(devices, most_layers))
    layers = [
        LayerCosts(
            draw(seconds),
            draw(seconds),
            draw(seconds),
            update_s=draw(st.sampled_from([0.0, 0.5])),
            activation_bytes=(size := draw(st.integers(0, 40))),
            weight_bytes=draw(st.integers(0, 9)),
            output_bytes=draw(st.integers(0, 5)),
            weight_grad_bytes=draw(st.none() | st.integers(0, size)),
        )
        for _ in range(count)
    ]
    link = draw(st.sampled_from([Link(), Link(0.75), Link(0.25, 4.0)]))
    return Problem(tuple(layers), devices, draw(st.integers(1, 9)), link, mode="pipeline")


def all_tasks(problem, schedule):
    stages, batches = range(len(schedule.stages)), range(problem.microbatches)
    every = {Task(kind, s, m) for kind in ("F", "dO", "dW") for s in stages for m in batches}
    return every | {Task("U", s) for s in stages}


def lower_bound_s(problem):
    """The chain of all F and dO of one micro-batch and a dW, or what the busiest device must do."""
    chain = sum(x.forward_s + x.output_grad_s for x in problem.layers)
    work = sum(x.forward_s + x.output_grad_s + x.weight_grad_s for x in problem.layers)
    return max(chain, work * problem.microbatches / problem.devices)


def needs(name):
    """Layers that a policy needs for each device."""
    return 2 if name in ("interleaved_1f1b", "zb_interleaved") else 1


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_every_schedule_is_whole_and_runs(name, data):
    problem = data.draw(problems().filter(lambda p: len(p.layers) >= needs(name) * p.devices))
    schedule = as_asked(policy_named(name), problem).trial.schedule
    validate(schedule, problem.layers)
    tasks = list(schedule.tasks)
    assert len(tasks) == len(set(tasks))
    assert set(tasks) == all_tasks(problem, schedule)
    assert schedule.fused_backward == (name in FUSED)
    assert schedule.mode == "pipeline"
    assert simulate(schedule, problem.layers, problem.link).makespan_s >= lower_bound_s(problem) * (1 - 1e-12)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_memory_limit(name, data):
    """At the leanest limit and above it is kept; below it the error says the leanest."""
    problem = data.draw(problems().filter(lambda p: len(p.layers) >= needs(name) * p.devices))

    def peak(limit):
        made = plan(
            layers=problem.layers, schedule=name, devices=problem.devices, microbatches=problem.microbatches,
            link=problem.link, memory_limit_bytes=limit, mode="pipeline",
        )  # fmt: skip
        return max(simulate(made, problem.layers, problem.link).peak_bytes)

    highest = peak(None)
    try:
        leanest = peak(1)
    except MemoryLimitError as error:
        leanest = error.smallest_bytes
        assert leanest > 1
    assert leanest <= max(highest, 1)
    limit = data.draw(st.integers(max(leanest, 1), max(highest, leanest, 1)))
    assert peak(limit) <= limit
    if leanest > 2:
        with pytest.raises(MemoryLimitError):
            peak(leanest - 1)


@pytest.mark.parametrize("name", ["1f1b", "fast_forward", "zb_h1", "zb_h2", "zb_auto"])
def test_the_leanest_has_one_micro_batch_in_flight(name):
    layers = [LayerCosts(3, 4, 2, activation_bytes=7)] * 4
    lean = plan(layers=layers, schedule=name, devices=4, microbatches=6, memory_limit_bytes=7)
    assert lean.predicted_peak_bytes == 7
    limits = [
        plan(layers=layers, schedule=name, devices=4, microbatches=6, memory_limit_bytes=7 * n)
        for n in range(1, 8)
    ]
    steps = [schedule.predicted_step_s for schedule in limits]
    assert steps == sorted(steps, reverse=True)


def test_zb_auto_uses_memory_between_h1_and_h2():
    """p = 4 equal stages: with 4 activations ZB-H1's bubble, with 7 ZB-H2's, and in between none is worse."""
    layers = [LayerCosts(3, 4, 2, activation_bytes=1)] * 4
    spans = []
    for limit in range(2, 9):
        made = plan(layers=layers, schedule="zb_auto", devices=4, microbatches=12, memory_limit_bytes=limit)
        spans.append(span_s(simulate(made, layers)))
    assert spans == sorted(spans, reverse=True)
    assert spans[2] == 12 * 9 + 3 * 5
    assert spans[5] == spans[6] == 12 * 9 + 3 * 3


@pytest.mark.parametrize(
    ("name", "devices", "options", "numbers"),
    [
        *((name, 7, {}, ("7", "6")) for name in [*ONE_STAGE, "modulo"]),
        ("interleaved_1f1b", 4, {}, ("8", "6")),
        ("interleaved_1f1b", 2, {"chunks": 4}, ("4 chunks", "8", "6")),
        ("zb_interleaved", 4, {}, ("2 stages", "4 devices", "6")),
        ("zb_interleaved", 2, {"chunks": 4}, ("8 stages", "6")),
        ("modulo", 3, {"group": 4}, ("group=4", "2 groups", "3 devices")),
    ],
)
def test_more_stages_than_layers(name, devices, options, numbers):
    layers = [LayerCosts(3, 4, 2)] * 6
    with pytest.raises(OptionsError) as raised:
        plan(layers=layers, schedule=name, devices=devices, microbatches=4, **options)
    for number in numbers:
        assert number in str(raised.value)


@pytest.mark.parametrize("value", [-1, 1.5, "two", True])
@pytest.mark.parametrize(
    ("name", "option"), [("interleaved_1f1b", "chunks"), ("zb_interleaved", "chunks"), ("modulo", "group")]
)
def test_options_are_whole_numbers(name, option, value):
    with pytest.raises(OptionsError, match=option):
        plan(layers=[LayerCosts(1, 1, 1)] * 4, schedule=name, devices=2, microbatches=2, **{option: value})


def test_interleaved_takes_any_number_of_microbatches():
    for devices in range(1, 6):
        for microbatches in range(1, 16):
            for chunks in (1, 2, 3):
                layers = tuple(LayerCosts(1 + i % 3, 2, 1) for i in range(devices * chunks))
                problem = Problem(layers, devices, microbatches, options={"chunks": chunks})
                validate(as_asked(policy_named("interleaved_1f1b"), problem).trial.schedule, layers)


def test_modulo_allocates_groups_in_turn():
    layers = [LayerCosts(1, 1, 1)] * 7
    schedule = plan(layers=layers, schedule="modulo", devices=3, microbatches=2, group=2)
    assert schedule.stages == ((0, 1), (2, 3), (4, 5), (6, 6))
    assert {device: {t.stage for t in lane} for (device, _), lane in schedule.lanes.items()} == {
        0: {0, 3}, 1: {1}, 2: {2},
    }  # fmt: skip


def test_modulo_searches_the_group():
    """Free messages: the smallest group has the smallest bubble; slow ones: as few as can be."""
    layers = [LayerCosts(1, 1, 1, output_bytes=1)] * 8

    def groups(link):
        schedule = plan(layers=layers, schedule="modulo", devices=2, microbatches=4, link=link)
        return len(schedule.stages)

    assert groups(Link()) == 8
    assert groups(Link(bytes_per_s=0.25)) == 2


def test_modulo_by_hand():
    """Two devices, four layers, F 1 s, dO 2 s, dW 1 s, one micro-batch: device 0 has layers 0 and 2.

    F 0-4 up the layers, dO 4-12 down.  Device 1: dO3 4-6, dW3 6-7, dO1 8-10, dW1 10-11.
    Device 0: dO2 6-8, dW2 8-9, dO0 10-12, dW0 12-13.
    """
    layers = [LayerCosts(1, 2, 1)] * 4
    schedule = plan(layers=layers, schedule="modulo", devices=2, microbatches=1, group=1, mode="pipeline")
    ends = {str(event.task): event.end_s for event in simulate(schedule, layers).events}
    assert ends["dW:3"] == 7
    assert ends["dO:2"] == 8
    assert ends["dW:1"] == 11
    assert ends["dW:0"] == schedule.predicted_step_s == 13


def test_modulo_beats_contiguous_stages_with_few_microbatches():
    layers = [LayerCosts(3, 4, 2)] * 16
    step_s = {
        name: plan(layers=layers, schedule=name, devices=4, microbatches=4).predicted_step_s
        for name in ("gpipe", "fast_forward", "modulo")
    }
    assert step_s["modulo"] < step_s["fast_forward"] < step_s["gpipe"]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_messages_without_time_need_no_nodes(problem):
    """A link so fast that a message adds nothing gives the same floats as one that takes no time."""
    schedule = as_asked(policy_named("zb_h1"), problem).trial.schedule
    latency_s = problem.link.latency_s
    free, fast = (
        simulate(schedule, problem.layers, Link(latency_s, rate), steps=2) for rate in (np.inf, 1e300)
    )
    np.testing.assert_array_equal(free.start_s, fast.start_s)
    np.testing.assert_array_equal(free.end_s, fast.end_s)
    assert len(free.messages) == len(fast.messages)
