"""Stages placed and ordered together: orders that can run, one stage of each round on each device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.building.lane_search import placements, searched
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import StepTasks, justified, shortest_justified
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.relation import stage_inputs
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import zb_interleaved
from tf_ooo.planning.simulation.simulator import simulate

SECONDS = st.integers(0, 9).map(float)


@st.composite
def staged(draw, most_chunks=3):
    """Stages with skips: each reads the one before, and perhaps an earlier one."""
    devices, chunks = draw(st.integers(2, 4)), draw(st.integers(1, most_chunks))
    layers = []
    for number in range(devices * chunks):
        skip = draw(st.none() | st.integers(0, number - 1)) if number > 1 else None
        inputs = sorted({number - 1, *([] if skip is None else [skip])}) if number else []
        seconds = [draw(SECONDS) for _ in range(3)]
        layers.append(LayerCosts(*seconds, inputs=tuple(inputs), output_bytes=draw(st.integers(0, 3))))
    link = draw(st.sampled_from([Link(), Link(0.5, 2.0)]))
    problem = Problem(tuple(layers), devices, draw(st.integers(1, 6)), link, mode="pipeline")
    return StagedLayers(problem, tuple((i, i) for i in range(len(layers))))


def assert_runs(stages, tasks, place, times, in_flight):
    """Every task once, after what it needs, one at a time on each device."""
    assert sorted(times.begun) == list(range(len(tasks.stage)))
    assert times.makespan_s == max(times.end_s)
    count, size = tasks.count, tasks.stages * tasks.count

    def after(earlier, later, sent_s=0.0):
        for batch in range(count):
            first, then = (kind * size + stage * count + batch for kind, stage in (earlier, later))
            lag_s = sent_s if place[earlier[1]] != place[later[1]] else 0.0
            assert times.start_s[then] >= times.end_s[first] + lag_s - 1e-9

    shape = Schedule("pipeline", "shape", stages=stages.bounds)
    for stage, inputs in enumerate(stage_inputs(shape, stages.problem.layers, tasks.stages)):
        after((0, stage), (1, stage))
        after((1, stage), (2, stage))
        for source, size_bytes in inputs:
            after((0, source), (0, stage), stages.problem.link.seconds(size_bytes))
            after((1, stage), (1, source), stages.problem.link.seconds(size_bytes))
        for batch in range(in_flight, count):
            dw, forward = 2 * size + stage * count + batch - in_flight, stage * count + batch
            assert times.start_s[forward] >= times.end_s[dw] - 1e-9
    for device in range(tasks.devices):
        lane = [task for task in times.begun if place[tasks.stage[task]] == device]
        for earlier, later in zip(lane, lane[1:], strict=False):
            assert times.start_s[later] >= times.end_s[earlier] - 1e-9


@settings(max_examples=60, deadline=None)
@given(staged(), st.integers(1, 7), st.data())
def test_orders_run(stages, in_flight, data):
    """Any placement, list scheduled and justified."""
    tasks = StepTasks(stages, in_flight)
    place = [data.draw(st.integers(0, tasks.devices - 1)) for _ in range(tasks.stages)]
    order = tasks.run(place, tasks.urgent)
    assert_runs(stages, tasks, place, order, in_flight)
    assert_runs(stages, tasks, place, justified(tasks, place, order), in_flight)
    assert shortest_justified(tasks, place, 2).makespan_s <= order.makespan_s


@settings(max_examples=60, deadline=None)
@given(staged())
def test_a_stage_of_each_round_on_each_device(stages):
    devices = stages.problem.devices
    places = list(placements(stages.seconds, devices))
    tasks = StepTasks(stages, 2 * devices)
    best = searched(tasks, stages.seconds.sum(axis=0), places)
    for place in (*(each.tolist() for each in places), best.place):
        for first in range(0, len(place), devices):
            assert sorted(place[first : first + devices]) == list(range(devices))
    in_turn = shortest_justified(tasks, places[0].tolist(), 1)
    assert best.times.makespan_s <= in_turn.makespan_s + 1e-9


@settings(max_examples=30, deadline=None)
@given(staged())
def test_the_same_costs_have_the_same_plan(stages):
    problem, texts = stages.problem, set[str]()
    if len(problem.layers) < 2 * problem.devices:
        return
    for _ in range(2):
        texts.add(zb_interleaved.make(problem).to_text())
    assert len(texts) == 1


def test_unequal_stages_are_shared_evenly():
    """Stages of 6, 2, 6 and 2 s in turn are 12 and 4 s on two devices; exchanged in a round 8 and 8."""
    layers = tuple(LayerCosts(s / 3, s / 3, s / 3) for s in (6.0, 2.0, 6.0, 2.0))
    schedule = zb_interleaved.make(Problem(layers, 2, 8, mode="pipeline"))
    assert schedule.device_of_stage in ([0, 1, 1, 0], [1, 0, 0, 1])
    # The device without the first stage begins after its F; it has 8 micro-batches of 8 s.
    assert simulate(schedule, layers).makespan_s == pytest.approx(8 * 8 + 2, abs=2 / 3)


def test_a_message_takes_its_time():
    """F and dO there and back: 1 + 3 + 1 + 1 + 3 + 1 s, and a dW."""
    layers = (LayerCosts(1, 1, 1, output_bytes=4),) * 2
    stages = StagedLayers(Problem(layers, 2, 1, Link(1.0, 2.0), mode="pipeline"), ((0, 0), (1, 1)))
    tasks = StepTasks(stages, 2)
    assert tasks.run([0, 1], tasks.urgent).makespan_s == 11
    assert tasks.run([0, 0], tasks.urgent).makespan_s == 6
    assert np.isclose(tasks.run([0, 1], tasks.urgent, reverse=True).makespan_s, 11)
