"""Measured timelines and rows of the pipeline benchmark, from made-up events."""

from __future__ import annotations

import dataclasses

import pytest

from tf_ooo.bench.pipeline.gantt import measured_timeline, task_seconds
from tf_ooo.bench.pipeline.pytorch import cut
from tf_ooo.bench.pipeline.rows import PipelineRun, overhead_row_of, text_of, torch_rows_of
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.fit.ran import busy_seconds, task_times
from tf_ooo.planning.building.merging import merged
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.simulation.simulator import simulate

F, DO, DW, U = Task("F", 0), Task("dO", 0), Task("dW", 0), Task("U", 0)


@dataclasses.dataclass
class Op:
    label: str
    begin_s: float
    duration_s: float


def lane(fused=False):
    return Schedule("pipeline", "made_up", {(0, 0): TaskList([F, DO, DW, U])}, fused_backward=fused)


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


def test_updates_beside_other_tasks_leave_no_negative_bubble():
    times = task_times(EVENTS, TASKS)
    assert times[DO].begin_s == 13.0
    timeline = measured_timeline(lane(), times, busy_seconds(EVENTS, TASKS, lane()))
    assert timeline.makespan_s == pytest.approx(8.0)
    # Idle from 12 to 13 only; 10.5 to 10.501 ran twice.
    assert timeline.busy_s == pytest.approx([7.0])
    assert timeline.bubble_fraction == pytest.approx(1 / 8)
    assert list(timeline.schedule.lanes) == [(0, 0), (0, 2)]
    by_task = {event.task: (event.start_s, event.end_s) for event in timeline.events}
    assert by_task[U] == pytest.approx((6.5, 8.0))
    assert by_task[DW] == pytest.approx((4.0, 7.0))


def test_a_dw_that_is_computed_with_its_do_is_drawn_behind_it():
    times = task_times([Op("o", 0.0, 1.0), Op("w", 1.0, 3.0), Op("o", 4.0, 2.0)], TASKS)
    timeline = measured_timeline(lane(fused=True), times)
    by_task = {event.task: (event.start_s, event.end_s) for event in timeline.events}
    assert by_task[DO] == pytest.approx((0.0, 3.0))
    assert by_task[DW] == pytest.approx((3.0, 6.0))


def test_seconds_of_tasks_beside_those_planned():
    rows = task_seconds(task_times(EVENTS, TASKS), [LayerCosts(1.5, 1.1, 2.5, 0.7)])
    assert [row[:2] for row in rows] == [["F", 0], ["U", 0], ["dO", 0], ["dW", 0]]
    assert [row[-1] for row in rows] == [1.5, 0.7, 1.1, 2.5]
    assert rows[3][2:4] == pytest.approx([3.0, 3.0])


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


def test_the_stages_of_the_comparison_hold_all_layers():
    for stages in (1, 2, 3, 4, 8):
        parts = [cut(17, stages, stage) for stage in range(stages)]
        assert [layer for part in parts for layer in part] == list(range(17))


def test_rows_of_the_comparison():
    found = {
        "devices": 2,
        "cores": 0.6,
        "torch": "torch 1",
        "runs": {"gpipe": {}, "zb_v": {}},
        "times": {
            "gpipe": [1.0, 1.2, 1.1],
            "zb_v": [0.8, 0.9, 0.7],
            "torch_serial": [1.8, 1.8, 1.9],
            "torch_1f1b": [1.0, 1.0, 1.3],
        },
    }
    rows = torch_rows_of(found, PipelineRun("feed_forward", 4, [], "", torch=True))
    assert [row["schedule"] for row in rows] == ["torch_1f1b"]
    assert rows[0]["baseline"] == "zb_v"
    assert rows[0]["speedup"] == pytest.approx(0.8)
    assert rows[0]["efficiency"] == pytest.approx(1.8 / 2)
    assert "0.80x zb_v" in text_of(rows[0])


def test_the_row_of_the_overhead():
    pairs = [(1.0, 1.02), (2.0, 2.02), (1.0, 1.03), (1.0, 0.99), (1.0, 1.5)]
    row = overhead_row_of("bert12", pairs, bit_equal=True)
    assert row["overhead"] == pytest.approx(0.02)
    assert row["overhead_quartiles"][0] <= 0.01 <= row["overhead_quartiles"][1]
    assert (row["devices"], row["microbatches"], row["pairs"]) == (1, 1, 5)
    assert "+2.0%" in text_of(row)


def test_a_gradients_constants_before_its_forward_pass_are_not_drawn():
    """A row of ones that the loss's gradient begins with waits for nothing, however long it takes."""
    events = [Op("early:Fill", 1.0, 0.5), Op("w:Const", 2.0, 1.0), *EVENTS[:3]]
    times = task_times(events, TASKS)
    assert times[DO].begin_s == 13.0
    assert DW not in times, "nothing else of it was seen"
    assert task_times(events, TASKS, late_gradients=True)[DO].begin_s == 1.0
