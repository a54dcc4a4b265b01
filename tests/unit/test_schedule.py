from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.schedule import KINDS, Schedule, Task
from tf_ooo.planning.policies import BACKWARD_ORDERS
from tf_ooo.planning.simulation.simulator import simulate, validate

HEAD = "tf_ooo schedule v1\nmode m\npolicy p\n"


@st.composite
def schedules(draw):
    layers = draw(st.lists(st.integers(0, 30), unique=True, max_size=8))
    lanes = {}
    for layer in layers:
        lane = draw(st.tuples(st.integers(0, 2), st.integers(0, 1)))
        kinds = [kind for kind in KINDS if draw(st.booleans())]
        lanes.setdefault(lane, []).extend(Task(kind, layer) for kind in kinds)
    seconds = draw(st.none() | st.floats(0, 1e9))
    return Schedule("m", "p", lanes, seconds, draw(st.none() | st.integers(0, 10**15)))


@given(schedules())
def test_round_trip(schedule):
    assert Schedule.from_text(schedule.to_text()) == schedule


@given(st.text() | st.text("dOWUF:0123456789 lane\n#").map(lambda text: HEAD + text))
def test_any_text_parses_or_raises_schedule_error(text):
    try:
        schedule = Schedule.from_text(text)
    except ScheduleError:
        return
    assert Schedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    ("line", "message"),
    [("lane 0 0: dX:1", "line 4: unknown op 'dX:1'"), ("lane 0 0: dO:1 dO:1", "line 4: duplicate: dO:1"),
     ("lane 0 0: dW:1 dO:1", "line 4: cycle: dO:1"), ("speed 3", "line 4: unknown entry 'speed'"),
     ("predicted_step_s nan", "line 4: predicted_step_s")],
)  # fmt: skip
def test_errors_name_line_and_op(line, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(HEAD + line)


def test_a_stage_that_is_not_there_is_named():
    with pytest.raises(ScheduleError, match=r"unknown op F:7 on lane 0 0: there are 1 stages"):
        Schedule.from_text(HEAD + "stage 0: 0-1\nlane 0 0: F:0 dO:0 dW:0 F:7")


def test_more_microbatches_than_tasks_are_refused_at_once():
    """Tables of all tasks there could be took gigabytes."""
    schedule = Schedule.from_text(HEAD + "microbatches 99999999\nlane 0 0: F:0@0 dO:0@0 dW:0@0")
    with pytest.raises(ScheduleError, match="missing: most F of .* 99999999 micro-batches"):
        validate(schedule)


@pytest.mark.parametrize(
    ("text", "message"),
    [("lane 0 0: dO:0 dW:0 dW:0.4095", "unknown op dW:0.4095: there is no line 'parts dW:0: ...'"),
     ("parts dO:0: 0.5 0.5\nlane 0 0: dO:0 dO:0.1 dO:0.2 dW:0", "unknown op dO:0.2: there are 2 parts"),
     ("parts dO:0: 0.5 0.5\nlane 0 0: dO:0 dW:0", "missing: dO:0.1@0 is not"),
     ("parts dO:0: 0.2 0.4 0.4\nlane 0 0: dO:0 dO:0.2 dW:0", "missing: dO:0.1@0 is not")],
)  # fmt: skip
def test_parts_are_those_that_are_given(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.from_text(HEAD + text))


def test_a_circle_over_several_steps():
    """dW of a step waits for dO of the next one, which stands behind it."""
    schedule = Schedule.from_text(HEAD + "after dW:0: dO:0 steps 1\nlane 0 0: F:0 dO:0 dW:0")
    for check in (validate, lambda made: simulate(made, [LayerCosts(1, 1, 1)], steps=3)):
        with pytest.raises(ScheduleError, match="cycle: over several steps: dW:0 waits for dO:0 of 1 steps"):
            check(schedule)


def test_missing_and_unknown_tasks_are_named():
    schedule = Schedule("m", "p", {(0, 0): (Task("dO", 1),)})
    with pytest.raises(ScheduleError, match="missing: dW:1"):
        schedule.require({Task("dO", 1), Task("dW", 1)})
    with pytest.raises(ScheduleError, match="unknown op dO:1"):
        schedule.require(set())


def test_policies_by_hand():
    tasks = frozenset(Task(kind, layer) for kind in ("dO", "dW") for layer in range(3)) - {Task("dO", 0)}
    text = {name: " ".join(map(str, policy((2, 1, 0), tasks))) for name, policy in BACKWARD_ORDERS.items()}
    assert text == {
        "in_order": "dO:2 dW:2 dO:1 dW:1 dW:0",
        "fast_forward": "dO:2 dO:1 dW:0 dW:1 dW:2",
    }
