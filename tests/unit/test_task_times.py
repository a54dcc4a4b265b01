"""Tests when tasks ran, from made-up events; and the memory of gradients that wait for their sum."""

from __future__ import annotations

import dataclasses

import pytest

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.fit.recorder import busy_seconds, task_times
from tf_ooo.planning.building.stages import merged
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.simulation.simulator import simulate

F, DO, DW, U = Task("F", 0), Task("dO", 0), Task("dW", 0), Task("U", 0)


@dataclasses.dataclass
class Op:
    label: str
    begin_s: float
    duration_s: float


LANE = Schedule("pipeline", "made_up", {(0, 0): TaskList([F, DO, DW, U])})
TASKS = {"f": F, "early": DO, "o": DO, "w": DW, "u": U, "constant": U}
EVENTS = [
    Op("f:MatMul", 10.0, 2.0),
    Op("early:Reshape", 10.5, 0.001),  # waits for nothing
    Op("o:MatMul", 13.0, 1.0),
    Op("w:MatMul", 14.0, 3.0),
    Op("u:AssignSubVariableOp", 16.5, 1.5),  # beside the dW
    Op("constant:Mul", 1.0, 0.5),  # made at any time: no part of the step
    Op("elsewhere:MatMul", 2.0, 5.0),
]


def test_updates_beside_other_tasks_count_once():
    assert task_times(EVENTS, TASKS)[DO].begin_s == 13.0
    # From 10 to 12 and from 13 to 18; 10.5 to 10.501 ran twice.
    assert busy_seconds(EVENTS, TASKS, LANE) == pytest.approx([7.0])


def test_a_gradients_constants_before_its_forward_pass_are_no_begin_of_it():
    """A row of ones that the loss's gradient begins with waits for nothing, however long it takes."""
    events = [Op("early:Fill", 1.0, 0.5), Op("w:Const", 2.0, 1.0), *EVENTS[:3]]
    times = task_times(events, TASKS)
    assert times[DO].begin_s == 13.0
    assert DW not in times, "nothing else of it was seen"
    assert task_times(events, TASKS, late_gradients=True)[DO].begin_s == 1.0


def test_gradients_that_wait_for_their_sum_count():
    layers = tuple(LayerCosts(1.0, 1.0, 1.0, weight_bytes=size) for size in (7, 100, 30))
    assert [stage.summand_bytes for stage in merged(layers, ((0, 1), (2, 2)))] == [0, 0]
    stages = merged(layers, ((0, 1), (2, 2)), microbatches=2)
    assert [stage.summand_bytes for stage in stages] == [107, 30]
    order = [F, Task("F", 0, 1), DO, DW, Task("dO", 0, 1), Task("dW", 0, 1), U]
    schedule = Schedule("pipeline", "made_up", {(0, 0): TaskList(order)}, microbatches=2)
    # Weights and their gradients, and while a dW runs that of the micro-batch.
    one = LayerCosts(1.0, 1.0, 1.0, 1.0, weight_bytes=100, summand_bytes=40)
    assert simulate(schedule, [one]).peak_bytes == [100 + 100 + 40]
    assert simulate(schedule, [dataclasses.replace(one, summand_bytes=0)]).peak_bytes == [200]
