"""Measured timelines beside planned ones, from times worked out by hand."""

from __future__ import annotations

import json

import pytest

from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.simulation.measured import (
    TaskTime,
    against_plan,
    begun_early,
    between_neighbours,
    measured_timeline,
    one_after_another,
    repeated,
)
from tf_ooo.report.report import Report

DO1, DO0, DW1, DW0, U1 = Task("dO", 1), Task("dO", 0), Task("dW", 1), Task("dW", 0), Task("U", 1)
PLAN = Schedule("single_device", "made_up", {(0, 0): TaskList([DO1, DO0, DW1, DW0])})
AS_PLANNED = {DO1: TaskTime(10.0, 11.0, 1.0), DO0: TaskTime(11.0, 13.0, 2.0), DW1: TaskTime(13.0, 16.0, 3.0)}


def test_tasks_are_counted_from_the_first_and_side_by_side_on_streams():
    times = {**AS_PLANNED, DW0: TaskTime(14.0, 15.5, 1.0), U1: TaskTime(16.0, 16.5, 0.5)}
    timeline = measured_timeline(PLAN, times, [5.0])
    times = {event.task: (event.start_s, event.end_s, event.stream) for event in timeline.events}
    assert times == {
        DO1: (0.0, 1.0, 0),
        DO0: (1.0, 3.0, 0),
        DW1: (3.0, 6.0, 0),
        DW0: (4.0, 5.5, 1),
        U1: (6.0, 6.5, 2),
    }
    assert timeline.makespan_s == 6.5
    assert timeline.busy_s == [5.0]


def test_an_order_that_no_schedule_may_plan_is_drawn_as_it_ran():
    timeline = measured_timeline(PLAN, {DW1: TaskTime(0.0, 1.0, 1.0), DO1: TaskTime(2.0, 3.0, 1.0)})
    assert [event.task for event in timeline.events] == [DW1, DO1]


def test_devices_are_those_of_the_plan():
    plan = Schedule("pipeline", "made_up", {(0, 0): TaskList([DO1]), (1, 0): TaskList([DO0])})
    timeline = measured_timeline(plan, {DO1: TaskTime(0.0, 1.0, 1.0), DO0: TaskTime(0.0, 2.0, 2.0)})
    assert {event.task: event.device for event in timeline.events} == {DO1: 0, DO0: 1}


def test_a_schedule_that_a_step_takes_in_turns():
    """Updates of all but the last turn are no tasks: others would come after them."""
    text = [Task("F", 0), Task("F", 0, 1), Task("dW", 0), Task("dW", 0, 1), Task("U", 0)]
    plan = Schedule("pipeline", "made_up", {(0, 0): TaskList(text)}, microbatches=2)
    twice = repeated(plan, 2)
    lane = " ".join(map(str, twice.lanes[0, 0]))
    assert lane == "F:0 F:0@1 dW:0 dW:0@1 F:0@2 F:0@3 dW:0@2 dW:0@3 U:0@2"
    assert twice.microbatches == 4
    assert repeated(plan, 1) is plan


def test_one_after_another():
    timeline = one_after_another(PLAN, {DO1: 1.0, DO0: 2.0, DW0: 4.0})
    assert timeline.start_s.tolist() == [[0.0, 1.0, 3.0, 3.0]]
    assert timeline.makespan_s == 7.0


def test_communication_is_between_its_neighbours():
    times = {DW1: TaskTime(1.0, 3.0, 2.0), U1: TaskTime(7.0, 8.0, 1.0), DW0: TaskTime(3.0, 4.0, 1.0)}
    unseen = [Task("comm", 1), Task("comm", 0), DO0]
    assert between_neighbours(times, unseen) == {Task("comm", 1): TaskTime(3.0, 7.0, 4.0)}


def test_begun_early_takes_out_as_few_as_possible():
    times = {DO1: (0.0, 1.0), DO0: (5.0, 6.0), DW1: (1.0, 2.0), DW0: (2.0, 3.0)}
    assert begun_early([DO1, DO0, DW1, DW0], times) == [(DW1, DO0)]
    assert begun_early([DO1, DW1, DW0, DO0], times) == []


def test_against_plan_names_the_first_and_says_seconds():
    times = {DO1: TaskTime(0.0, 1.0, 1.0), DW1: TaskTime(1.0, 2.0, 1.0), DO0: TaskTime(3.0, 4.0, 1.0)}
    measured = measured_timeline(PLAN, times)
    planned = one_after_another(PLAN, dict.fromkeys(PLAN.tasks, 1.0))
    lines = against_plan(PLAN, measured, planned, str)
    assert lines == [
        "1 of 4 planned tasks were not seen by the profiler",
        "measured order differs from the plan in 1 of 3 tasks: dW:1 began before dO:0; no edge orders them, "
        "and their inputs were there early",
        "a step planned 4.00 s, measured 4.00 s (with the profiler)",
        "busy, planned device 0 100%; measured device 0 75%",
    ]
    assert "; because" in against_plan(PLAN, measured, planned, str, "because")[1]


def test_an_order_as_planned():
    lines = against_plan(PLAN, measured_timeline(PLAN, AS_PLANNED), None, str)
    assert lines[1] == "measured order is the plan's (3 tasks)"


def test_trace_has_both_in_processes_of_their_own(tmp_path):
    report = Report(planned=PLAN, timeline=one_after_another(PLAN, {DO1: 1.0, DO0: 2.0}))
    report.change(measured_timeline=measured_timeline(PLAN, AS_PLANNED))
    trace = json.loads(report.save_trace(tmp_path / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert sorted(names.values()) == ["measured: device 0", "planned: device 0"]
    spans = [(names[e["pid"]], e["name"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert ("planned: device 0", "dO:0", 2e6) in spans
    assert ("measured: device 0", "dW:1", 3e6) in spans
    assert trace["otherData"]["measured"]["makespan_s"] == pytest.approx(6.0)


def test_trace_without_seconds_says_so(tmp_path):
    trace = json.loads(Report(planned=PLAN).save_trace(tmp_path / "trace.json").read_text())
    (name,) = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert name == "planned order, times not measured: device 0"
    assert "not measured" in trace["otherData"]["times"]
