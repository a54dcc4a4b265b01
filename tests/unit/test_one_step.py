"""One step of a plan is what a measured one is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from tf_ooo.costs import LayerCosts, Link
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.simulation.measured import one_by_one
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

LAYERS = [LayerCosts(1 + i, 2, 3, 0.5, 40, 30, 5) for i in range(4)]
LINK = Link(0.1, 50)


def test_the_last_of_several_steps_begins_at_zero():
    schedule = plan(layers=LAYERS, schedule="in_order", devices=4, link=LINK, mode="data_parallel")
    whole = simulate(schedule, LAYERS, LINK, steps=3)
    step = whole.one_step()
    assert step.steps == 1
    first_s = whole.start_s[2].min()
    assert np.allclose(step.start_s[0], whole.start_s[2] - first_s)
    assert step.makespan_s == pytest.approx(whole.makespan_s - first_s)
    (curve,) = step.memory
    (of_all,) = whole.memory
    assert curve.time_s[0] == 0
    assert curve.alive_bytes[-1] == of_all.alive_bytes[-1]
    assert curve.alive_bytes[0] == of_all.alive_bytes[of_all.time_s <= first_s][-1]


def test_one_step_is_itself():
    schedule = plan(layers=LAYERS, schedule="1f1b", devices=2, microbatches=4)
    timeline = simulate(schedule, LAYERS)
    assert timeline.one_step() is timeline


def test_a_round_has_each_task_once_within_a_period():
    link = Link(0.01, 1000)
    schedule = plan(
        layers=LAYERS, schedule="pipedream", devices=2, microbatches=12, link=link, mode="layerpipe"
    )
    whole = simulate(schedule, LAYERS, link)
    step = whole.one_step()
    each = {(task.kind, task.stage, task.part) for task in schedule.tasks}
    assert len(step.schedule.tasks) == len(set(step.schedule.tasks)) == len(each)
    assert step.start_s.min() == 0
    assert step.start_s.max() < whole.steady_step_s
    assert len(step.memory) == len(whole.memory) == 2
    assert (step.message_columns.start_s >= 0).all()


def test_a_whole_step_of_one_device_by_hand():
    """F 1 + 2, then dO 4 beside dW 3 on the other stream, then U 5 + 6."""
    lanes = {(0, 0): (Task("dO", 1),), (0, 1): (Task("dW", 1),)}
    schedule = Schedule("single_device", "multi_stream", lanes)
    seconds = {Task("F", 0): 1.0, Task("F", 1): 2.0, Task("dO", 1): 4.0, Task("dW", 1): 3.0}
    seconds |= {Task("U", 0): 5.0, Task("U", 1): 6.0}
    timeline = one_by_one(schedule, seconds)
    spans = {str(event.task): (event.start_s, event.end_s) for event in timeline.events}
    assert spans == {
        "F:0": (0, 1),
        "F:1": (1, 3),
        "dO:1": (3, 7),
        "dW:1": (3, 6),
        "U:0": (7, 12),
        "U:1": (12, 18),
    }
    assert timeline.makespan_s == 18
