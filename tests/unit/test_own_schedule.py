"""Files of schedules: where what is wrong is said to be, and what a fit refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tf_ooo
from tf_ooo.errors import OptionsError, ScheduleError
from tf_ooo.modes.by_name import Options
from tf_ooo.modes.pipeline.partition import as_run, check_own, units_of
from tf_ooo.modes.pipeline.planning import SCHEDULES, PlanRequest, make_plan
from tf_ooo.modes.table import MODES
from tf_ooo.planning.model.schedule import Schedule, Task
from tf_ooo.planning.model.schedule_file import ScheduleFile, read_schedule

COSTS = [
    tf_ooo.LayerCosts(float(i), 2.0, 3.0, 1.0, activation_bytes=i, weight_bytes=2, name=f"l{i}")
    for i in range(1, 9)
]


def file_of(schedule):
    text = schedule.to_text()
    return ScheduleFile("mine.txt", text, Schedule.from_text(text))


def planned(name, devices=2, microbatches=4):
    return tf_ooo.plan(layers=COSTS, schedule=name, devices=devices, microbatches=microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_named_schedule_may_be_a_file(name):
    """Planned by name and from the file: the same order, cut and seconds."""
    schedule = planned(name)
    file = file_of(schedule)
    check_own(file, devices=2, microbatches=4, replicas=1)
    wanted = PlanRequest("auto", 2, 4, own=file)
    plan = make_plan(COSTS, units_of(len(COSTS), []), wanted)
    assert plan.schedule.lanes == schedule.lanes
    assert plan.problem.bounds == schedule.stages
    assert plan.step_s == pytest.approx(tf_ooo.simulate(schedule, COSTS).makespan_s)
    assert [candidate.name for candidate in plan.candidates] == [name]


def test_fewer_micro_batches():
    schedule = as_run(planned("zb_v"), 3)
    assert schedule.microbatches == 3
    assert Task("F", 0, 2) in schedule.tasks
    assert len(schedule.tasks) == 4 * (3 * 3 + 1)
    assert tf_ooo.simulate(schedule, [tf_ooo.LayerCosts(1.0, 1.0, 1.0)] * 4).makespan_s > 0


def test_a_cut_that_the_model_does_not_have():
    wanted = PlanRequest("auto", 2, 4, own=file_of(planned("gpipe")))
    for layers, inseparable, message in (
        (COSTS[:7], [], "line 9: stages hold 8 layers, the model has 7"),
        (COSTS, [(3, 7)], "line 9: no cut is possible before layer"),
    ):
        with pytest.raises(ScheduleError, match=f"^mine.txt: {message}"):
            make_plan(layers, units_of(len(layers), inseparable), wanted)
    without = dataclasses.replace(planned("gpipe"), stages=())
    plan = make_plan(COSTS, units_of(8, [(0, 3)]), PlanRequest("auto", 2, 4, own=file_of(without)))
    assert plan.problem.bounds[0][0] == 0
    assert plan.problem.bounds[1][0] > 3
    with pytest.raises(OptionsError, match="2 stages are more than the 1 layers"):
        make_plan(COSTS, units_of(8, [(0, 7)]), PlanRequest("auto", 2, 4, own=file_of(without)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "layerpipe"}, "line 2: mode layerpipe: a pipeline runs"),
        ({"asynchronous": True}, "line 6: asynchronous: a fit runs no such"),
        ({"workers": 3}, "line 5: workers 3: the fit has 1; give replicas=3"),
        ({"after": ((Task("U", 0), Task("U", 1), 0),)}, r"line 8: after: a fit"),
        ({"parts": {("dO", 0): (0.5, 0.5)}}, r"line 8: parts: a fit"),
        ({"priority_lanes": frozenset({(1, 0)})}, "line 9: lane 1 0: a fit runs one lane"),
    ],
)
def test_what_no_fit_runs(changes, message):
    file = file_of(dataclasses.replace(planned("gpipe"), **changes))
    text = "\n".join(line for line in file.text.split("\n") if not line.startswith("predicted"))
    with pytest.raises(ScheduleError, match=f"^mine.txt: {message}"):
        check_own(dataclasses.replace(file, text=text), devices=2, microbatches=4, replicas=1)


def test_workers_that_are_replicas():
    check_own(file_of(dataclasses.replace(planned("gpipe"), workers=3)), 2, 4, replicas=3)


@given(st.data())
def test_no_order_that_is_let_through_waits_for_itself(data):
    """Any order of each lane: it can be simulated, or is refused with the lane's line."""
    schedule = planned("zb_h1", microbatches=2)
    lanes = {lane: data.draw(st.permutations(list(tasks))) for lane, tasks in schedule.lanes.items()}
    text = dataclasses.replace(schedule, lanes={}, stages=()).to_text() + "".join(
        f"lane {device} 0: {' '.join(map(str, tasks))}\n" for (device, _), tasks in lanes.items()
    )
    try:
        file = ScheduleFile("mine.txt", text, Schedule.from_text(text))
        check_own(file, 2, 2, 1)
    except ScheduleError as error:
        if "line " in str(error):
            return
        raise
    simulated = tf_ooo.simulate(as_run(file.schedule, 2), [tf_ooo.LayerCosts(1.0, 2.0, 3.0, 1.0)] * 2)
    assert simulated.makespan_s >= 12


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ScheduleError, match="cannot be read"):
            read_schedule(path)
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="it is no text in UTF-8"):
        read_schedule(tmp_path / "text.txt")


def test_which_modes_take_a_file():
    for given_as in ("mine.txt", "./mine", Path("mine")):
        typed = tf_ooo.Pipeline(schedule=given_as)
        assert typed == Options(mode="pipeline", schedule=given_as).typed
        assert Path(typed.schedule) == Path(given_as)
        assert not typed.may_fall_back
        for mode in MODES:
            if mode != "pipeline":
                with pytest.raises(OptionsError, match="file is run by mode='pipeline' only, not by mode"):
                    Options(mode=mode, schedule=given_as)
    with pytest.raises(OptionsError, match="did you mean 'fast_forward'"):
        Options(mode="pipeline", schedule="fast_foward")
    with pytest.raises(
        OptionsError, match="chunks=2 goes with schedule='interleaved_1f1b', 'zb_interleaved' only"
    ):
        tf_ooo.Pipeline(schedule="mine.txt", chunks=2)
