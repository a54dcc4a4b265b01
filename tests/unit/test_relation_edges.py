"""All edges of small schedules, written out by hand; what is sent has a different size everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from tf_ooo import LayerCosts, Schedule
from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.relation import Relation, stage_inputs
from tf_ooo.planning.model.schedule import Task

HEAD = "tf_ooo schedule v1\nmode pipeline\npolicy byhand\n"
CHAIN = [LayerCosts(1, 1, 1, output_bytes=size) for size in (8, 20, 3)]
OUTPUT, STORED = "the output of the stage before", "the stored activations"
GRADIENT, INPUT = "the output gradient", "the stored input"
EVERY, WEIGHTS = "the gradient of every micro-batch", "the weights of the step before"
BARRIER, OWN = "the barrier between steps", "the weight gradient"


def relation(text, layers=CHAIN):
    return Relation(Schedule.from_text(HEAD + text), layers)


def edges(text, layers=CHAIN):
    """Each edge as ``(why, bytes, steps, source, target)``."""
    made = relation(text, layers)
    rows = [
        (e.why, e.message_bytes, e.steps, str(made.task(int(a))), str(made.task(int(b))))
        for e in made.edges
        for a, b in zip(e.source, e.target, strict=True)
    ]
    return sorted(rows, key=str)


def of(why, size, steps, *pairs):
    return [(why, size, steps, *pair.split(" > ")) for pair in pairs]


def all_of(*groups):
    return sorted((row for group in groups for row in group), key=str)


def test_two_stages_and_two_microbatches():
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1 dO:0@0 dW:0@0 dO:0@1 dW:0@1 U:0@0\n"
    text += "lane 1 0: F:1@0 dO:1@0 F:1@1 dO:1@1 dW:1@0 dW:1@1 U:1@0\n"
    assert edges(text, CHAIN[:2]) == all_of(
        of(OUTPUT, 8, 0, "F:0 > F:1", "F:0@1 > F:1@1"),
        of(STORED, 8, 0, "F:0 > dO:0", "F:0@1 > dO:0@1"),
        of(STORED, 0, 0, "F:1 > dO:1", "F:1@1 > dO:1@1"),
        of(GRADIENT, 8, 0, "dO:1 > dO:0", "dO:1@1 > dO:0@1", "dO:0 > dW:0", "dO:0@1 > dW:0@1"),
        of(GRADIENT, 0, 0, "dO:1 > dW:1", "dO:1@1 > dW:1@1"),
        # The lanes' order says the rest: the last dW before U, the first F after it.
        of(EVERY, None, 0, "dW:0@1 > U:0", "dW:1@1 > U:1"),
        of(WEIGHTS, None, 1, "U:0 > F:0", "U:1 > F:1"),
    )


def test_without_costs_it_is_a_chain():
    assert edges("lane 0 0: F:0 F:1 F:2\n", None) == of(OUTPUT, 0, 0, "F:0 > F:1", "F:1 > F:2")


def test_a_priority_lane_orders_nothing():
    text = "microbatches 2\nlane 0 0 priority: F:0@0 F:0@1 dW:0@0 dW:0@1\nlane 0 1: comm:0@0 U:0@0\n"
    assert edges(text, CHAIN[:1]) == all_of(
        of(INPUT, None, 0, "F:0 > dW:0", "F:0@1 > dW:0@1"),
        of(EVERY, None, 0, "dW:0 > comm:0", "dW:0@1 > comm:0", "comm:0 > U:0"),
        of(WEIGHTS, None, 1, "U:0 > F:0", "U:0 > F:0@1"),
    )


def test_each_lane_has_a_first_and_a_last():
    """dW on two lanes, both before U; F on two lanes, both after it."""
    text = "microbatches 4\nlane 0 0: F:0@0 F:0@1 dW:0@0 dW:0@1 U:0@0\nlane 1 0: F:0@2 F:0@3 dW:0@2 dW:0@3\n"
    rows = edges(text, CHAIN[:1])
    assert [row for row in rows if row[0] != INPUT] == all_of(
        of(EVERY, None, 0, "dW:0@1 > U:0", "dW:0@3 > U:0"),
        of(WEIGHTS, None, 1, "U:0 > F:0", "U:0 > F:0@2"),
    )


@pytest.mark.parametrize(("fused", "sender"), [("", "dO"), ("fused_backward yes\n", "dW")])
def test_fused_a_gradient_is_sent_after_its_dw(fused, sender):
    """A stage without a dW of its own sends after its dO all the same."""
    text = fused + "lane 0 0: F:0 dO:0 dW:0\nlane 1 0: F:1 dO:1 dW:1\nlane 2 0: F:2 dO:2\n"
    rows = [row for row in edges(text) if row[0] == GRADIENT]
    assert rows == all_of(
        of(GRADIENT, 8, 0, f"{sender}:1 > dO:0", "dO:0 > dW:0"),
        of(GRADIENT, 20, 0, "dO:2 > dO:1", "dO:1 > dW:1"),
    )


def test_stages_without_a_kind_are_looked_through():
    """Stage 1 has no F and no dO: what it would read comes from the stages around it."""
    text = "lane 0 0: F:0 F:2 dO:2 dW:2 dW:1 dO:0 dW:0\n"
    assert edges(text) == all_of(
        of(OUTPUT, 8, 0, "F:0 > F:2"),
        of(STORED, 8, 0, "F:0 > dO:0"),
        of(STORED, 0, 0, "F:2 > dO:2"),
        of(GRADIENT, 20, 0, "dO:2 > dO:0", "dO:2 > dW:1"),
        of(GRADIENT, 8, 0, "dO:0 > dW:0"),
        of(GRADIENT, 0, 0, "dO:2 > dW:2"),
        of(WEIGHTS, None, 1, "dW:0 > F:0", "dW:2 > F:2"),
    )


def test_dw_without_a_do_waits_for_its_stored_input():
    assert edges("lane 0 0: F:0 dW:0 comm:0\n", CHAIN[:1]) == all_of(
        of(INPUT, None, 0, "F:0 > dW:0"),
        of(EVERY, None, 0, "dW:0 > comm:0"),
        of(WEIGHTS, None, 1, "comm:0 > F:0"),
    )


def test_dw_elsewhere_is_sent_the_input_by_whoever_made_it():
    """dW:1 of the second micro-batch runs on the first device, beside F:0; that of the others on a third."""
    text = "microbatches 3\nlane 0 0: F:0@0 F:0@1 F:0@2 dW:1@1\n"
    text += "lane 1 0: F:1@0 F:1@1 F:1@2 dO:1@0 dO:1@1 dO:1@2\nlane 2 0: dW:1@0 dW:1@2\n"
    rows = [row for row in edges(text, CHAIN[:2]) if row[0] == INPUT]
    assert rows == of(INPUT, 8, 0, "F:0 > dW:1", "F:0@1 > dW:1@1", "F:0@2 > dW:1@2")
    beside = text.replace("dO:1@2\nlane 2 0: dW:1@0 dW:1@2", "dO:1@2 dW:1@0 dW:1@2")
    rows = [row for row in edges(beside, CHAIN[:2]) if row[0] == INPUT]
    assert rows == of(INPUT, 8, 0, "F:0@1 > dW:1@1")


def test_a_part_sends_its_share():
    text = "parts dO:1: 0.25 0.75\nlane 0 0: F:0 dO:0\nlane 1 0: F:1 dO:1 dO:1.1\n"
    rows = [row for row in edges(text, CHAIN[:2]) if row[0] in (GRADIENT, STORED)]
    assert rows == all_of(
        of(GRADIENT, 2.0, 0, "dO:1 > dO:0"),
        of(GRADIENT, 6.0, 0, "dO:1.1 > dO:0"),
        of(STORED, 8, 0, "F:0 > dO:0"),
        of(STORED, 0, 0, "F:1 > dO:1", "F:1 > dO:1.1"),
    )


def test_parts_beyond_those_that_are_said_send_all():
    """These are the parts that validate refuses by name."""
    text = "parts dO:1: 0.25 0.75\nlane 0 0: F:0 dO:0\nlane 1 0: F:1 dO:1 dO:1.3\n"
    rows = [row for row in edges(text, CHAIN[:2]) if row[0] == GRADIENT]
    assert rows == all_of(of(GRADIENT, 2.0, 0, "dO:1 > dO:0"), of(GRADIENT, 8, 0, "dO:1.3 > dO:0"))


def test_slices_of_a_communication():
    text = "parts comm:0: 0.5 0.5\nlane 0 0: dW:0\nlane 0 1 priority: comm:0 comm:0.1\nlane 0 2: U:0\n"
    rows = [row for row in edges(text, CHAIN[:1]) if row[0] == EVERY]
    assert rows == of(EVERY, None, 0, "comm:0 > U:0", "comm:0.1 > U:0", "dW:0 > comm:0", "dW:0 > comm:0.1")


def test_with_a_barrier_all_forwards_wait_for_all_updates():
    """Stage 1 has no update of its own: its last task is its dW."""
    text = "barrier yes\nlane 0 0 priority: F:0 F:1 dO:1 dW:1 dW:0\nlane 0 1: U:0\nlane 1 0: F:2\n"
    rows = [row for row in edges(text) if row[2]]
    assert rows == of(
        BARRIER, None, 1, "U:0 > F:0", "U:0 > F:1", "U:0 > F:2", "dW:1 > F:0", "dW:1 > F:1", "dW:1 > F:2"
    )


def test_asynchronous_updates_follow_their_microbatch():
    text = "microbatches 2\nasynchronous yes\nlane 0 0: F:0@0 F:0@1 dW:0@0 dW:0@1\n"
    rows = edges(text + "lane 0 1: comm:0@0 U:0@0 comm:0@1 U:0@1\n", CHAIN[:1])
    assert rows == all_of(
        of(INPUT, None, 0, "F:0 > dW:0", "F:0@1 > dW:0@1"),
        of(OWN, None, 0, "dW:0 > comm:0", "dW:0@1 > comm:0@1", "comm:0 > U:0", "comm:0@1 > U:0@1"),
    )
    alone = edges(text + "lane 0 1: U:0@0 U:0@1\n", CHAIN[:1])
    assert [row for row in alone if row[0] == OWN] == of(OWN, None, 0, "dW:0 > U:0", "dW:0@1 > U:0@1")


def test_after_is_an_edge_of_this_step_or_of_a_later_one():
    text = "after dW:1: F:0 steps 2\nafter dW:0: F:1\nlane 0 0: F:0 F:1 dW:1 dW:0\n"
    rows = [row for row in edges(text, CHAIN[:2]) if row[0].startswith("after")]
    assert rows == all_of(of("after F:0", None, -2, "F:0 > dW:1"), of("after F:1", None, 0, "F:1 > dW:0"))
    with pytest.raises(ScheduleError, match="after dW:1: F:7: there is no F:7 in the schedule"):
        edges(text.replace("F:0 steps 2", "F:7"))
    with pytest.raises(ScheduleError, match="after dW:6: F:1: there is no dW:6 in the schedule"):
        edges(text.replace("dW:0: F:1", "dW:6: F:1"))


def test_a_stage_reads_each_layer_outside_it_once():
    """Layers 2 and 3 are one stage; they read layers 0 (twice) and 1, and each other."""
    layers = [LayerCosts(1, 1, 1, output_bytes=size) for size in (1, 10)]
    layers += [LayerCosts(1, 1, 1, inputs=(0, 1), output_bytes=100)]
    layers += [LayerCosts(1, 1, 1, inputs=(0, 2), output_bytes=1000), LayerCosts(1, 1, 1, inputs=(3, 1))]
    text = "stage 0: 0-1\nstage 1: 2-3\nstage 2: 4-4\nlane 0 0: F:0 F:1 F:2 dO:2 dO:1 dO:0\n"
    schedule = Schedule.from_text(HEAD + text)
    assert stage_inputs(schedule, layers, 3) == [[], [(0, 11.0)], [(0, 10.0), (1, 1000.0)]]
    # One more than there are layers reads nothing.
    assert stage_inputs(Schedule("m", "p"), layers[:2], 3) == [[], [(0, 1.0)], []]
    assert stage_inputs(Schedule("m", "p"), None, 3) == [[], [(0, 0.0)], [(1, 0.0)]]
    rows = edges(text, layers)
    assert [row for row in rows if row[0] == OUTPUT] == all_of(
        of(OUTPUT, 11, 0, "F:0 > F:1"), of(OUTPUT, 10, 0, "F:0 > F:2"), of(OUTPUT, 1000, 0, "F:1 > F:2")
    )
    # The kept bytes are as many as the larger of what is sent on.
    assert of(STORED, 11, 0, "F:0 > dO:0")[0] in rows


def test_nodes_are_places_in_the_lanes():
    made = relation("microbatches 2\nlane 0 0: F:0@1 F:0@0\nlane 2 1: dO:1.1@1 dW:1@0\n", CHAIN[:2])
    assert made.nodes("F", 0).tolist() == [[1, 0]]
    assert made.nodes("F", 1).tolist() == [[-1, -1]]
    assert made.nodes("dO", 1).tolist() == [[-1, -1], [-1, 2]]
    assert made.nodes("U", 1).tolist() == [[-1, -1]]
    assert [made.has(*at) for at in (("F", 0), ("F", 1), ("dO", 1), ("dW", 1), ("U", 0))] == [
        True, False, True, True, False,
    ]  # fmt: skip
    assert made.device.tolist() == [0, 0, 2, 2]
    assert made.lane.tolist() == [0, 0, 1, 1]
    assert made.bases.tolist() == [0, 2, 4]
    assert (made.stages, len(made), made.task(2)) == (2, 4, Task("dO", 1, 1, 1))


def test_how_many_stages():
    """The stages are those that are told, or that the tasks need."""
    told = "stage 0: 0-0\nstage 1: 1-1\nstage 2: 2-2\n"
    assert relation(told + "lane 0 0: F:0\n").stages == 3
    assert relation("lane 0 0: F:4\n", None).stages == 5
    empty = Relation(Schedule("m", "p"))
    assert (empty.stages, len(empty), empty.edges) == (0, 0, [])
    assert Relation(Schedule("m", "p", barrier=True)).edges == []
    assert relation("barrier yes\nlane 0 0: F:0\nlane 1 0: dW:0\n", None).edges[-1].steps == 1


def test_a_schedule_with_most_tasks_missing_is_refused_before_its_table_is_made():
    """dO has 2 parts of 2 stages: 4 places for each micro-batch; 64 for each task and 65536 may be there."""
    tasks = "lane 0 0: F:0 dO:1.1\n"
    most = (2 * 64 + 65536) // 4
    kept = relation(f"microbatches {most}\n{tasks}", CHAIN[:2])
    assert kept.nodes("dO", 1).shape == (2, most)
    with pytest.raises(ScheduleError) as caught:
        relation(f"microbatches {most + 1}\n{tasks}", CHAIN[:2])
    size = f"2 parts x 2 stages x {most + 1} micro-batches"
    assert str(caught.value) == f"missing: most dO of {size}; the schedule has 2 tasks"


def test_a_schedule_of_few_tasks_may_have_many_places():
    most = 64 + 65536
    assert relation(f"microbatches {most}\nlane 0 0: F:0\n", None).nodes("F", 0).shape == (1, most)
    with pytest.raises(ScheduleError, match="most F of 1 parts x 1 stages"):
        relation(f"microbatches {most + 1}\nlane 0 0: F:0\n", None)


def test_the_first_task_of_all_waits_too():
    assert edges("lane 0 0: F:1\nlane 1 0: F:0\n", CHAIN[:2]) == of(OUTPUT, 8, 0, "F:0 > F:1")


def test_edges_of_one_reason_and_size_stand_together():
    made = relation("lane 0 0: F:0 F:1 F:2 dO:2 dO:1\n", [CHAIN[0]] * 3)
    keys = [(e.why, e.message_bytes, e.steps) for e in made.edges]
    assert len(keys) == len(set(keys))
    assert all(isinstance(e.source, np.ndarray) and e.source.shape == e.target.shape for e in made.edges)
