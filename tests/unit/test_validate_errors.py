"""Each thing that is wrong with a schedule is refused by name, and what is right next to it is not."""

from __future__ import annotations

import pytest

from tf_ooo import LayerCosts, Schedule
from tf_ooo.errors import CostError, ScheduleError
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.simulation.simulator import deadlock, validate

HEAD = "tf_ooo schedule v1\nmode pipeline\npolicy byhand\n"
COSTS = [LayerCosts(1, 2, 3, update_s=4), LayerCosts(2, 3, 4, update_s=5)]
BOTH = "microbatches 2\nlane 0 0: F:0@0 F:0@1 dO:0@0 dO:0@1 dW:0@0 dW:0@1 U:0@0\n"
BOTH += "lane 1 0: F:1@0 F:1@1 dO:1@0 dO:1@1 dW:1@0 dW:1@1 U:1@0\n"


def check(text, layers=None):
    validate(Schedule.from_text(HEAD + text), layers)


def refused(text, layers=None, error=ScheduleError):
    with pytest.raises(error) as caught:
        check(text, layers)
    return str(caught.value)


def test_a_whole_schedule_is_accepted():
    check(BOTH)
    check(BOTH, COSTS)


@pytest.mark.parametrize("task", ["F:0@0", "F:0@1", "F:1@1", "dO:0@1", "dO:1@0", "dW:0@1", "dW:1@0"])
@pytest.mark.parametrize("layers", [None, COSTS])
def test_a_missing_task_is_named(task, layers):
    assert refused(BOTH.replace(f" {task}", ""), layers) == f"missing: {task} is not in the schedule"


@pytest.mark.parametrize(
    ("kind", "stage"), [(kind, stage) for kind in ("F", "dO", "dW", "U") for stage in (0, 1)]
)
def test_a_kind_that_has_costs_is_missing_for_one_stage(kind, stage):
    text = BOTH.replace(f" {kind}:{stage}@0", "").replace(f" {kind}:{stage}@1", "")
    check(text)
    assert refused(text, COSTS) == f"missing: {kind}:{stage} has costs and is not in the schedule"
    field = {"F": "forward_s", "dO": "output_grad_s", "dW": "weight_grad_s", "U": "update_s"}[kind]
    free = list(COSTS)
    free[stage] = LayerCosts(**{f: getattr(COSTS[stage], f) for f in vars(COSTS[stage])} | {field: 0})
    check(text, free)


def test_of_a_stage_of_several_layers_any_may_have_costs():
    text = "stage 0: 0-1\nstage 1: 2-2\nlane 0 0: dO:1 dO:0 dW:0\n"
    free = LayerCosts(0, 0, 0)
    check(text, [free, free, free])
    assert refused(text, [free, free, LayerCosts(0, 0, 1)]).startswith("missing: dW:1 has costs")
    other = text.replace(" dO:0", "")
    for layers in ([LayerCosts(0, 1, 0), free, free], [free, LayerCosts(0, 1, 0), free]):
        assert refused(other, layers).startswith("missing: dO:0 has costs")


def test_forwards_and_updates_may_be_left_out_everywhere():
    """The plan for a graph orders the backward pass alone; that needs all of dO and dW."""
    check("lane 0 0: dO:1 dO:0 dW:0 dW:1\n", COSTS)
    assert refused("lane 0 0: dO:1 dO:0\n", COSTS) == "missing: dW:0 has costs and is not in the schedule"
    assert refused("lane 0 0: dW:0 dW:1\n", COSTS) == "missing: dO:0 has costs and is not in the schedule"


def test_as_many_layers_as_costs():
    text = "lane 0 0: dO:1 dO:0 dW:0 dW:1\n"
    assert refused(text, COSTS[:1], CostError) == "costs are missing for layer 1: the schedule has 2 layers"
    more = [*COSTS, COSTS[0]]
    assert refused(text, more) == "missing: layer 2 has costs and is in no stage of the schedule"
    staged = "stage 0: 0-0\nstage 1: 1-3\n" + text
    check(staged, [*COSTS, *COSTS])
    assert refused(staged, more, CostError) == "costs are missing for layer 3: the schedule has 4 layers"
    three = "stage 0: 0-0\nstage 1: 1-1\nstage 2: 2-3\nlane 0 0: dO:2 dO:1 dO:0 dW:0 dW:1 dW:2\n"
    check(three, [*COSTS, *COSTS])
    assert refused(three, more, CostError) == "costs are missing for layer 3: the schedule has 4 layers"
    five = [*COSTS, *COSTS, COSTS[0]]
    assert refused(staged, five) == "missing: layer 4 has costs and is in no stage of the schedule"


def test_parts_of_a_stage_that_is_not_there():
    for stage in (2, 5):
        told = refused(f"parts comm:{stage}: 0.5 0.5\n" + BOTH)
        assert told == f"parts comm:{stage}: the schedule has 2 stages"


def test_parts_are_as_many_as_are_said():
    lanes = "microbatches 2\nlane 0 0: dO:0@0 dO:0@1 dW:0@0 dW:0@1\n"
    for more in ("dO:0@0 dO:0.1@1", "dO:0.1@1 dO:0@0"):
        told = refused(lanes.replace("dO:0@0", more))
        assert told == "unknown op dO:0.1: there is no line 'parts dO:0: ...'"
    parts = "parts dO:0: 0.25 0.75\n" + lanes.replace("dO:0@1", "dO:0@1 dO:0.1@0 dO:0.1@1")
    check(parts)
    assert refused(parts.replace(" dO:0.1@1", "")) == "missing: dO:0.1@1 is not in the schedule"
    assert refused(parts.replace(" dO:0@1", "")) == "missing: dO:0@1 is not in the schedule"
    none = parts.replace(" dO:0.1@0", "").replace(" dO:0.1@1", "")
    assert refused(none) == "missing: dO:0.1@0 is not in the schedule"
    assert refused(parts.replace("dO:0.1@1", "dO:0.1@1 dO:0.5@0")) == "unknown op dO:0.5: there are 2 parts"


def test_one_update_a_step_belongs_to_the_first_microbatch():
    lanes = "microbatches 3\nlane 0 0: dO:0@0 dO:0@1 dO:0@2 dW:0@0 dW:0@1 dW:0@2"
    check(f"{lanes} U:0@0\n")
    check(f"{lanes} U:0@0 U:0@1 U:0@2\n")
    check(lanes.replace("lane 0 0", "lane 0 0: U:0@0\nlane 1 0") + "\n")
    assert refused(f"{lanes} U:0@1\n") == "missing: U:0@0 is not in the schedule"
    assert refused(f"{lanes} U:0@0 U:0@2\n") == "missing: U:0@1 is not in the schedule"


def test_asynchronous_updates_come_with_each_microbatch():
    tasks = " ".join(f"dO:0@{m} dW:0@{m}" for m in range(5))
    each = f"microbatches 5\nasynchronous yes\nlane 0 0: {tasks}\nlane 0 1: "
    check(each + " ".join(f"U:0@{m}" for m in range(5)) + "\n")
    assert refused(each + "U:0@0 U:0@1 U:0@2 U:0@4\n") == "missing: U:0@3 is not in the schedule"
    assert refused(each + "U:0@0\n") == "missing: U:0@1 is not in the schedule"


def circle(between):
    """dO:0 waits for dO:1, which stands after F:1@1, which waits for F:0@1: that stands after dO:0."""
    fillers = range(2, 2 + between)
    first = ["F:0@0", "dO:0@0", *(f"F:0@{m}" for m in fillers), "F:0@1", "dO:0@1"]
    second = ["F:1@0", "F:1@1", "dO:1@0", "dO:1@1", *(f"F:1@{m}" for m in fillers)]
    lanes = [first + [f"dO:0@{m}" for m in fillers], second + [f"dO:1@{m}" for m in fillers]]
    rows = "".join(f"lane {number} 0: {' '.join(lane)}\n" for number, lane in enumerate(lanes))
    return f"microbatches {2 + between}\n{rows}"


def test_a_circle_is_shown_task_by_task():
    here, there = "on lane 0 0", "on lane 1 0"
    assert refused(circle(1)) == (
        f"cycle: F:0@2 {here} waits for dO:0, which stands before it; "
        f"dO:0 {here} waits for dO:1 {there} (the output gradient); "
        f"dO:1 {there} waits for F:1@1, which stands before it; "
        f"F:1@1 {there} waits for F:0@1 {here} (the output of the stage before); "
        f"F:0@1 {here} waits for F:0@2, which stands before it"
    )


def test_of_a_long_circle_twelve_are_shown():
    twelve, thirteen, more = refused(circle(8)), refused(circle(9)), refused(circle(21))
    assert twelve.count(" waits for ") == thirteen.count(" waits for ") == more.count(" waits for ") == 12
    assert "more" not in twelve
    assert thirteen.endswith("; and 1 more")
    assert more.endswith("; and 13 more")


def test_a_priority_lane_takes_what_is_ready():
    """If one of the two lanes has no order of its own nothing waits in a circle."""
    check(circle(1).replace("lane 0 0", "lane 0 0 priority"))
    check(circle(1).replace("lane 1 0", "lane 1 0 priority"))


def test_a_circle_of_data_alone():
    """The lane's order gives way: it is a priority lane, or the data say more."""
    lanes = "after F:0: dO:0\nlane 0 0 priority: F:0 dO:0\n"
    here = "on lane 0 0"
    assert refused(lanes) == (
        f"cycle: dO:0 {here} waits for F:0 {here} (the stored activations); "
        f"F:0 {here} waits for dO:0 {here} (after dO:0)"
    )
    assert refused(lanes.replace(" priority", "")) == refused(lanes)


def test_what_leads_to_a_circle_is_not_part_of_it():
    """F:1 waits for a circle of the stage before it."""
    text = "after F:0: dO:0\nlane 0 0: F:1 F:2\nlane 1 0: F:0 dO:0\n"
    message = refused(text)
    assert message.startswith("cycle: F:0 on lane 1 0 waits for dO:0")
    assert "F:1" not in message
    assert message.count(" waits for ") == 2


def test_a_circle_over_several_steps():
    """F:0 of the next step needs the update, which needs dW:0, which is to wait for that F:0."""
    lanes = "lane 0 0: F:0 dO:0\nlane 0 1: dW:0 U:0\n"
    assert refused("after dW:0: F:0 steps 1\n" + lanes) == (
        "cycle: over several steps: dW:0 waits for F:0 of 1 steps later"
    )
    check("after dW:0: F:0\n" + lanes)
    # Without an update nobody waits: only the layers of the stages have to be known.
    stages = "stage 0: 0-1\nstage 1: 2-5\n"
    pinned = "after dO:0: F:0 steps 2\nlane 0 0: F:0 F:1\nlane 0 1: dO:1 dO:0\n"
    check(stages + pinned)
    check(pinned)
    check(stages + pinned, [LayerCosts(1, 1, 0)] * 6)


def test_waits_of_later_steps_are_not_shown_for_a_circle_within_one():
    text = "after dW:0: F:0 steps 1\nafter F:0: dO:0\nlane 0 0: F:0 dO:0 dW:0\n"
    assert "steps later" not in refused(text)
    assert "dW:0" not in refused(text)
    schedule = Schedule.from_text(HEAD + "after dO:0: F:0 steps 3\nafter dO:0: F:0\nlane 0 0: F:0 dO:0\n")
    assert str(deadlock(Relation(schedule))) == (
        "cycle: over several steps: dO:0 waits for F:0 of 3 steps later"
    )
