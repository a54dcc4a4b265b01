"""Orders within each device's memory: forwards wait for room, and the search is never slower for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_justification import assert_runs, staged
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.building.choice import on_paper, within_limit
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.stages import merged, one_each
from tf_ooo.planning.building.step_tasks import StepTasks
from tf_ooo.planning.building.within_room import Room
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.policies import one_f_one_b, zb_search

BYTES = st.integers(0, 9)


def with_bytes(layer, data):
    """Some layers keep less for dW, some run again; their gradients wait for their sum; no task takes 0 s."""
    stored, again = data.draw(BYTES), data.draw(st.sampled_from([0, 0, 3]))
    kept = data.draw(st.integers(0, stored + again))
    return dataclasses.replace(
        layer,
        forward_s=layer.forward_s + 1,
        output_grad_s=layer.output_grad_s + 1,
        weight_grad_s=layer.weight_grad_s + 1,
        activation_bytes=stored + again,
        weight_grad_bytes=kept,
        recomputed_bytes=again,
        summand_bytes=data.draw(st.sampled_from([0, 4])),
    )


def staged_within(data, stages, place, spare_bytes):
    """Return the stages with bytes; the device that needs most has room for one micro-batch and some more."""
    layers = tuple(with_bytes(layer, data) for layer in stages.problem.layers)
    problem = dataclasses.replace(stages.problem, layers=layers, memory_limit_bytes=0)
    room = Room(StagedLayers(problem, stages.bounds, place))
    limit = int(np.ceil((room.one_batch - room.for_batches).max())) + spare_bytes
    return StagedLayers(dataclasses.replace(problem, memory_limit_bytes=limit), stages.bounds, place)


@settings(max_examples=40, deadline=None)
@given(staged(), st.integers(0, 30), st.integers(1, 7), st.data())
def test_any_order_keeps_the_room(stages, spare_bytes, in_flight, data):
    """Nothing waits for itself however little room there is, and the peaks are those of a simulation."""
    devices = range(stages.problem.devices)
    place = tuple(data.draw(st.permutations(devices)) * (len(stages.bounds) // len(devices)))
    limited = staged_within(data, stages, place, spare_bytes)
    room, tasks = Room(limited), StepTasks(limited, in_flight)
    assert room.for_one
    free = tasks.run(place, data.draw(st.permutations(range(len(tasks.stage)))))
    within = room.kept_by(tasks, free)
    assert_runs(limited, tasks, place, within, in_flight)
    assert room.over_bytes(tasks, within) <= 0
    for times in (free, within):
        timeline = on_paper(limited.problem, limited.with_updates("any", tasks.orders(place, times)))
        over_bytes = max(timeline.peak_bytes) - limited.problem.memory_limit_bytes
        assert room.over_bytes(tasks, times) == pytest.approx(over_bytes, abs=1e-3)


@pytest.mark.parametrize(("limit_bytes", "makespan_s"), [(2, 7.0), (1, 10.0)])
def test_by_hand(limit_bytes, makespan_s):
    """With room for one micro-batch the second F begins when the first dW ends, after 5 s."""
    layers = (LayerCosts(1.0, 1.0, 1.0, activation_bytes=1),) * 2
    stages = StagedLayers(Problem(layers, 2, 2, memory_limit_bytes=limit_bytes), one_each(layers))
    tasks = StepTasks(stages)
    free = tasks.run(stages.place or (0, 1), tasks.urgent)
    assert free.makespan_s == 7.0
    assert Room(stages).over_bytes(tasks, free) == pytest.approx(2 - limit_bytes, abs=1e-3)
    stages = dataclasses.replace(stages, place=(0, 1))
    assert Room(stages).kept_by(tasks, free).makespan_s == makespan_s


LAYERS = st.builds(
    LayerCosts,
    st.integers(1, 4).map(float),
    st.integers(1, 4).map(float),
    st.integers(1, 4).map(float),
    activation_bytes=st.integers(1, 9),
    weight_bytes=st.integers(0, 3),
)


@settings(max_examples=6, deadline=None)
@given(st.lists(LAYERS, min_size=6, max_size=8), st.integers(2, 3), st.integers(6, 8), st.floats(0.7, 1))
def test_never_slower_than_without_waiting(layers, devices, microbatches, share):
    problem = Problem(tuple(layers), devices, microbatches, mode="pipeline")
    peak_bytes = max(on_paper(problem, one_f_one_b.make(problem)).peak_bytes)
    limited = dataclasses.replace(problem, memory_limit_bytes=int(share * peak_bytes))
    schedule = zb_search.make(limited)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zb_search, "_waiting", lambda *_: [])
        before = zb_search.make(limited)
    if within_limit(limited, before):
        assert within_limit(limited, schedule)
        assert on_paper(limited, schedule).makespan_s <= on_paper(limited, before).makespan_s + 1e-9


def test_gradients_of_a_stage_that_wait_for_their_sum():
    """Two layers' gradients of a model's stage do, as in the plan that comes of it."""
    model = tuple(LayerCosts(1.0, 1.0, 1.0, weight_bytes=size, summand_bytes=1) for size in (5, 3, 7, 2))
    units, bounds = ((0, 1), (2, 2), (3, 3)), ((0, 0), (1, 2))
    problem = Problem(merged(model, units, 4), 2, 4, model=model, bounds=units)
    assert StagedLayers(problem, bounds).summand_bytes.tolist() == [5 + 3 + 1, 7 + 2 + 1]
    assert [stage.summand_bytes for stage in merged(model, ((0, 1), (2, 3)), 4)] == [9, 10]
