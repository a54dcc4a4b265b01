"""V-shaped pipelines: closed forms, memory, unequal costs, golden orders, published ratios."""

from collections import Counter
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import MemoryLimitError, OptionsError
from tf_ooo.planning.building.v_shape import HALF, MIN, ZB, Style, block, lanes, squeezed, v_stages
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate, validate
from tf_ooo.rewriting.plan import plan

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = ("zb_v", "v_half", "v_min", "dualpipe_v")
LIMITS = {
    "zb_v": lambda p: 2 * p,
    "v_half": lambda p: 2 * ((p + 2) // 2),
    "v_min": lambda p: 2 * ((p + 4) // 3),
    "dualpipe_v": lambda p: 2 * p + 1,
}


def equal(count, forward_s=1.0, output_grad_s=1.0, weight_grad_s=1.0):
    return tuple(
        LayerCosts(forward_s, output_grad_s, weight_grad_s, activation_bytes=1) for _ in range(count)
    )


def made(name, layers, devices, microbatches, **more):
    return POLICIES[name].make(Problem(tuple(layers), devices, microbatches, **more))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_closed_forms_for_equal_costs(p):
    layers, m = equal(2 * p), 3 * p
    run = {name: simulate(made(name, layers, p, m), layers) for name in NAMES}
    bubble = {name: timeline.makespan_s - 6 * m for name, timeline in run.items()}
    assert {name: max(timeline.peak_bytes) for name, timeline in run.items()} == {
        name: LIMITS[name](p) for name in NAMES
    }
    # Devices start one F after the other and never wait then: steps without a barrier have no bubble.
    assert bubble["zb_v"] == p - 1
    assert run["zb_v"].steady_step_s == 6 * m
    # F + 2 dO - 2 dW for each device but one: a dW less than published, as dO is sent before dW.
    assert bubble["dualpipe_v"] == p - 1
    if p > 2:
        assert bubble["v_half"] == 6 * ceil(p / 2) - 7
        assert bubble["v_min"] <= (4 * p - 7 if p % 3 == 0 else 4 * p - 5)
    # The published bubbles: a half and two thirds of 1F1B's.
    assert bubble["v_half"] <= (6 * p - 6) / 2
    assert bubble["v_min"] <= (6 * p - 6) * 2 / 3


@pytest.mark.parametrize("p", range(2, 13))
def test_blocks_store_what_their_paper_says(p):
    for steps, name in ((ZB, "zb_v"), (HALF, "v_half"), (MIN, "v_min")):
        assert block(steps, p).limit == LIMITS[name](p)


@pytest.mark.parametrize("costs", [(2, 3, 1), (3, 4, 3), (1, 2, 1), (3, 3, 2)])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_dualpipe_v_bubble_is_within_the_published_one(costs, p):
    forward, output_grad, weight_grad = costs
    layers = equal(2 * p, *map(float, costs))
    bubble = simulate(made("dualpipe_v", layers, p, 3 * p), layers).makespan_s - 6 * p * sum(costs)
    backward = output_grad + weight_grad
    assert 0 < bubble <= (p - 1) * (forward + 2 * output_grad - 2 * weight_grad)
    assert bubble < (p - 1) * ((forward + backward) + backward - 3 * weight_grad)


def test_makespan_by_hand():
    # F down and up 0-4, dO 4-12; dW:3 fills device 0's gap 6-9; device 1: dO 6-10, dW 10-13 and 13-16.
    layers = equal(4, 1.0, 2.0, 3.0)
    schedule = made("zb_v", layers, 2, 1)
    timeline = simulate(schedule, layers)
    start = {event.task: event.start_s for event in timeline.events}
    assert (start[Task("dO", 3)], start[Task("dW", 3)], start[Task("dO", 0)]) == (4, 6, 10)
    assert timeline.makespan_s == 16


def test_stages_lie_in_a_v():
    schedule = made("v_min", equal(8), 4, 3)
    where = {task.stage: device for (device, _), tasks in schedule.lanes.items() for task in tasks}
    assert where == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 0}


seconds = st.floats(0.1, 4.0)


@st.composite
def problems(draw):
    devices = draw(st.integers(1, 4))
    count = draw(st.integers(2 * devices, 2 * devices + 3))
    layers = [
        LayerCosts(draw(seconds), draw(seconds), draw(seconds), activation_bytes=1, output_bytes=1)
        for _ in range(count)
    ]
    link = Link(draw(st.floats(0, 1)), draw(st.floats(0.5, 10)))
    return Problem(tuple(layers), devices, draw(st.integers(1, 7)), link)


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(NAMES))
def test_valid_complete_and_within_the_stated_memory(problem, name):
    schedule = POLICIES[name].make(problem)
    validate(schedule, problem.layers)
    expected = Counter(
        Task(kind, stage, m)
        for kind in ("F", "dO", "dW")
        for stage in range(2 * problem.devices)
        for m in range(problem.microbatches)
    )
    expected.update(Task("U", stage) for stage in range(2 * problem.devices))
    assert Counter(schedule.tasks) == expected
    for tasks in schedule.lanes.values():
        stored = highest = 0
        for task in tasks:
            stored += {"F": 1, "dW": -1}.get(task.kind, 0)
            highest = max(highest, stored)
        assert highest <= LIMITS[name](problem.devices)
    assert Schedule.from_text(schedule.to_text()) == schedule


@settings(max_examples=25, deadline=None)
@given(problems(), st.booleans(), st.sampled_from(["dW", "F"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_squeezing_keeps_the_limit_whatever_the_style(problem, yielding, fill, patience):
    stages = v_stages(problem)
    of = block(HALF, problem.devices)
    style = Style(yielding, fill, patience)
    validate(squeezed("v", stages, lanes(of, problem.microbatches), of.limit, style), problem.layers)


@settings(max_examples=25, deadline=None)
@given(problems(), st.sampled_from(NAMES[:3]), st.integers(2, 30))
def test_memory_limit_is_kept_or_refused_with_the_smallest(problem, name, limit):
    ask = {"layers": list(problem.layers), "devices": problem.devices, "link": problem.link}
    ask |= {"microbatches": problem.microbatches, "schedule": name}
    smallest = max(
        simulate(
            made(
                name,
                problem.layers,
                problem.devices,
                problem.microbatches,
                link=problem.link,
                memory_limit_bytes=0,
            ),
            problem.layers,
            problem.link,
        ).peak_bytes
    )
    if limit < smallest:
        with pytest.raises(MemoryLimitError) as raised:
            plan(**ask, memory_limit_bytes=limit)
        limit = raised.value.smallest_bytes
    schedule = plan(**ask, memory_limit_bytes=limit)
    assert max(simulate(schedule, problem.layers, problem.link).peak_bytes) <= limit


def test_less_memory_step_by_step():
    layers = equal(16)
    peaks, makespans = [], []
    for limit in (16, 12, 8, 5, 2):
        schedule = made("zb_v", layers, 8, 24, memory_limit_bytes=limit)
        timeline = simulate(schedule, layers)
        peaks.append(max(timeline.peak_bytes))
        makespans.append(timeline.makespan_s)
    assert all(peak <= limit for peak, limit in zip(peaks, (16, 12, 8, 5, 2), strict=True))
    assert makespans == sorted(makespans)


def test_too_few_layers_are_refused():
    with pytest.raises(OptionsError, match="8 stages are more than the 7 layers"):
        made("zb_v", equal(7), 4, 4)


@pytest.mark.parametrize("name", NAMES)
def test_golden(name):
    layers = [LayerCosts(1.0, 2.0, 1.0), *equal(6), LayerCosts(2.0, 1.0, 3.0)]
    text = made(name, layers, 3, 6).to_text()
    assert text == (GOLDEN / f"{name}.txt").read_text()
