"""Seconds, messages, links, steps and shared devices one at a time, each worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tf_ooo import LayerCosts, Link, Schedule, simulate
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OptionsError, ScheduleError
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.simulation.simulator import task_seconds

HEAD = "tf_ooo schedule v1\nmode pipeline\npolicy byhand\n"
WAVE = HEAD.replace("pipeline", "layerpipe") + "asynchronous yes\n"


def run(text, layers, *more, head=HEAD, **options):
    return simulate(Schedule.from_text(head + text), layers, *more, **options)


def times(timeline):
    return {f"{e.task}+{e.step}" if e.step else str(e.task): (e.start_s, e.end_s) for e in timeline.events}


def sent(timeline):
    return [(m.source, m.target, m.size_bytes, m.start_s, m.end_s) for m in timeline.messages]


def test_seconds_of_each_task():
    layers = [
        LayerCosts(1, 10, 100, update_s=1000, weight_bytes=6),
        LayerCosts(2, 20, 200, update_s=2000, weight_bytes=12),
        LayerCosts(4, 40, 400, update_s=4000, weight_bytes=18),
    ]
    text = "workers 3\nstage 0: 0-1\nstage 1: 2-2\nparts dO:1: 0.25 0.75\nparts comm:0: 0.25 0.75\n"
    text += "lane 0 0: F:0 F:1 dO:1 dO:1.1 dO:0 dW:0 dW:1\nlane 0 1: comm:0 comm:0.1 comm:1\n"
    relation = Relation(Schedule.from_text(HEAD + text + "lane 0 2: U:0 U:1\n"), layers)
    # Four rounds of a third each, half a second and 2 bytes/s: 18 bytes take 4 * (0.5 + 3).  In slices
    # 1.5 and 3 bytes of the two layers take 4 * (0.5 + 0.25) + 4 * (0.5 + 0.5).
    link = Link(0.5, 2)
    slices = 4 * 0.75 + 4 * 1.0, 4 * 1.25 + 4 * 2.0
    assert task_seconds(relation, layers, link).tolist() == [
        3, 4, 10, 30, 30, 300, 400, *slices, 14, 3000, 4000,
    ]  # fmt: skip
    whole = Relation(Schedule.from_text(HEAD + "workers 3\nlane 0 0: comm:1\n"), layers[:2])
    assert task_seconds(whole, layers[:2], link).tolist() == [4 * (0.5 + 2)]
    joined = Relation(Schedule.from_text(HEAD + "workers 3\nstage 0: 0-1\nlane 0 0: comm:0\n"), layers[:2])
    assert task_seconds(joined, layers[:2], link).tolist() == [4 * (0.5 + 3)]


def test_devices_have_speeds_and_the_runtime_takes_time_for_each_task_but_messages():
    layers = [LayerCosts(2, 4, 6, update_s=8, weight_bytes=16)]
    text = "workers 2\nlane 0 0: F:0 dW:0 U:0\nlane 0 1: comm:0\nlane 1 0: dO:0\n"
    relation = Relation(Schedule.from_text(HEAD + text), layers)
    link = Link(bytes_per_s=4, speeds=(2, 0.5), task_s=0.25)
    assert task_seconds(relation, layers, link).tolist() == [1.25, 3.25, 4.25, 2 * 8 / 4, 8.25]


def test_layers_that_are_computed_again_are_there():
    text = "lane 0 0: F:0 F:1 dO:1 dW:1 dO:0 dW:0\n"
    assert times(run("recompute 1\n" + text, TWICE))["dO:1"] == (2, 4)
    for layer in (2, 4):
        with pytest.raises(ScheduleError) as caught:
            run(f"recompute {layer}\n" + text, TWICE)
        assert str(caught.value) == f"recompute {layer}: there are 2 layers"


TWICE = [LayerCosts(1, 1, 1), LayerCosts(1, 1, 1)]


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", None])
def test_steps_are_a_whole_number(steps):
    message = f"steps must be a whole number of at least 1, got {steps!r}"
    with pytest.raises(OptionsError) as caught:
        run("lane 0 0: F:0\n", [LayerCosts(1, 0, 0)], steps=steps)
    assert str(caught.value) == message


def test_the_link_is_that_of_the_table_unless_another_is_given():
    layers = (LayerCosts(1, 0, 0, output_bytes=6), LayerCosts(1, 0, 0))
    table, text = CostTable(layers, Link(0, 2)), "lane 0 0: F:0\nlane 1 0: F:1\n"
    assert times(run(text, layers))["F:1"] == (1, 2)
    assert times(run(text, table))["F:1"] == (4, 5)
    assert times(run(text, table, Link(0, 3)))["F:1"] == (3, 4)
    assert run(text, table)._repeat(4).steps == 4
    assert times(run(text, table)._repeat(1))["F:1"] == (4, 5)


def test_steps_one_after_the_other_on_lanes_of_different_length():
    """Three steps; F:0 waits for its own update of the step before, F:1 for its dW."""
    layers = [LayerCosts(1, 0, 2, update_s=4), LayerCosts(8, 0, 16)]
    timeline = run("lane 0 0: F:0 dW:0\nlane 0 1: U:0\nlane 1 0: F:1 dW:1\n", layers, steps=3)
    assert times(timeline) == {
        "F:0": (0, 1), "dW:0": (1, 3), "U:0": (3, 7), "F:1": (1, 9), "dW:1": (9, 25),
        "F:0+1": (7, 8), "dW:0+1": (8, 10), "U:0+1": (10, 14), "F:1+1": (25, 33), "dW:1+1": (33, 49),
        "F:0+2": (14, 15), "dW:0+2": (15, 17), "U:0+2": (17, 21), "F:1+2": (49, 57), "dW:1+2": (57, 73),
    }  # fmt: skip
    assert timeline.start_s.shape == timeline.end_s.shape == (3, 5)
    assert timeline.makespan_s == 73


def test_a_task_may_wait_for_one_of_two_steps_later():
    """dO:0 of step t waits for F:0 of step t + 2; in the last two steps for nothing."""
    text = "after dO:0: F:0 steps 2\nlane 0 0: dO:0\nlane 1 0: F:0\n"
    at = times(run(text, [LayerCosts(2, 1, 0)], steps=4))
    assert [at[f"F:0{step}"] for step in ("", "+1", "+2", "+3")] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [at[f"dO:0{step}"] for step in ("", "+1", "+2", "+3")] == [(6, 7), (8, 9), (9, 10), (10, 11)]


TWO_SENDERS = [
    LayerCosts(5, 0, 0, output_bytes=2),
    LayerCosts(1, 0, 0, output_bytes=3, inputs=()),
    LayerCosts(1, 0, 0, inputs=(0,)),
    LayerCosts(1, 0, 0, inputs=(1,)),
]


def test_a_link_takes_messages_of_two_streams_as_they_become_ready():
    text = "lane 0 0: F:0\nlane 0 1: F:1\nlane 1 0: F:3 F:2\n"
    timeline = run(text, TWO_SENDERS, Link(0.5, 1))
    assert sent(timeline) == [(0, 1, 3, 1, 4), (0, 1, 2, 5, 7)]
    assert times(timeline) == {"F:0": (0, 5), "F:1": (0, 1), "F:3": (4.5, 5.5), "F:2": (7.5, 8.5)}


def test_a_link_takes_messages_of_a_priority_lane_as_they_become_ready():
    """F:0 is the more urgent, and waits for F:4 on another lane; F:1 is sent meanwhile."""
    layers = [dataclasses.replace(TWO_SENDERS[0], forward_s=1), *TWO_SENDERS[1:], LayerCosts(4, 0, 0)]
    layers[4] = dataclasses.replace(layers[4], inputs=())
    text = "after F:0: F:4\nlane 0 0 priority: F:0 F:1\nlane 1 0: F:3 F:2\nlane 2 0: F:4\n"
    timeline = run(text, layers, Link(0, 1))
    assert sent(timeline) == [(0, 1, 3, 1, 4), (0, 1, 2, 5, 7)]


def test_a_link_for_each_pair_of_devices_and_each_direction():
    """All at once: 0 to 1, 0 to 2, 1 to 0."""
    layers = [
        LayerCosts(1, 0, 0, output_bytes=4),
        LayerCosts(1, 0, 0, output_bytes=6, inputs=()),
        LayerCosts(1, 0, 0, inputs=(0,)),
        LayerCosts(1, 0, 0, inputs=(0,)),
        LayerCosts(1, 0, 0, inputs=(1,)),
    ]
    timeline = run("lane 0 0: F:0 F:4\nlane 1 0: F:1 F:2\nlane 2 0: F:3\n", layers, Link(0, 2))
    assert sorted(sent(timeline)) == [(0, 1, 4, 1, 3), (0, 2, 4, 1, 3), (1, 0, 6, 1, 4)]
    assert times(timeline)["F:4"] == (4, 5)
    assert timeline.message_bytes == 14


def test_what_two_tasks_read_is_sent_once_as_large_as_the_larger_needs():
    """Stage 0 is layers 0 and 1: stage 1 reads both, stage 2 the first."""
    layers = [
        LayerCosts(1, 0, 0, output_bytes=10),
        LayerCosts(1, 0, 0, output_bytes=4),
        LayerCosts(1, 0, 0, inputs=(0, 1)),
        LayerCosts(1, 0, 0, inputs=(0,)),
    ]
    text = "stage 0: 0-1\nstage 1: 2-2\nstage 2: 3-3\nlane 0 0: F:0\nlane 1 0: F:2 F:1\n"
    timeline = run(text, layers, Link(0, 2))
    assert sent(timeline) == [(0, 1, 14, 2, 9)]
    assert times(timeline)["F:2"] == (9, 10)


def test_messages_of_two_steps_queue_on_one_link():
    """6 s a message, F:0 every second."""
    text = "lane 0 0: F:0\nlane 1 0: F:1\n"
    timeline = run(text, [LayerCosts(1, 0, 0, output_bytes=12), LayerCosts(1, 0, 0)], Link(1, 2), steps=3)
    assert sent(timeline) == [(0, 1, 12, 1, 7), (0, 1, 12, 7, 13), (0, 1, 12, 13, 19)]
    assert [e.start_s for e in timeline.events if e.task.stage] == [8, 14, 20]


def test_a_message_that_takes_no_time_arrives_a_latency_later():
    text = "lane 0 0: F:0\nlane 1 0: F:1\nlane 2 0: F:2\n"
    layers = [LayerCosts(1, 0, 0, output_bytes=12), LayerCosts(2, 0, 0, output_bytes=5), LayerCosts(1, 0, 0)]
    timeline = run(text, layers, Link(0.25))
    assert sent(timeline) == [(0, 1, 12, 1, 1), (1, 2, 5, 3.25, 3.25)]
    assert times(timeline) == {"F:0": (0, 1), "F:1": (1.25, 3.25), "F:2": (3.5, 4.5)}
    nothing = run(text, [dataclasses.replace(layer, output_bytes=0) for layer in layers], Link(0, 4))
    assert times(nothing)["F:2"] == (3, 4)


def test_sender_and_first_reader_pay_for_a_message_on_a_slow_link_too():
    """8 bytes: 2 s at each end, 4 s on the link, half a second more; in each of two steps."""
    layers = [LayerCosts(1, 0, 0, output_bytes=8), LayerCosts(1, 0, 0), LayerCosts(1, 0, 0, inputs=(0,))]
    link = Link(0.5, 2, 0.25)
    timeline = run("lane 0 0: F:0\nlane 1 0: F:2 F:1\n", layers, link, steps=2)
    assert times(timeline) == {
        "F:0": (0, 3), "F:2": (7.5, 10.5), "F:1": (10.5, 11.5),
        "F:0+1": (3, 6), "F:2+1": (11.5, 14.5), "F:1+1": (14.5, 15.5),
    }  # fmt: skip
    alone = run("lane 0 0: F:0 F:1 F:2\n", layers, link)
    assert alone.makespan_s == 3


NEW_WEIGHTS = [LayerCosts(1, 1, 1, update_s=1, weight_bytes=30), LayerCosts(1, 1, 1, update_s=1)]


def test_new_weights_take_time_from_each_device_that_reads_them():
    """3 s from U for each of two other devices, and 3 s there; not where U itself is."""
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1\nlane 1 0: dO:0@0 dO:0@1\n"
    text += "lane 2 0: dW:0@0 U:0@0 dW:0@1 U:0@1\n"
    at = times(run(text, NEW_WEIGHTS[:1], Link(overhead_s_per_byte=0.1), head=WAVE))
    assert at == {
        "F:0": (0, 4), "F:0@1": (4, 8), "dO:0": (4, 8), "dO:0@1": (8, 12),
        "dW:0": (8, 9), "U:0": (9, 16), "dW:0@1": (16, 17), "U:0@1": (17, 24),
    }  # fmt: skip
    beside = text.replace("lane 1 0", "lane 2 1")
    at = times(run(beside, NEW_WEIGHTS[:1], Link(overhead_s_per_byte=0.1), head=WAVE))
    assert (at["dO:0"], at["U:0"]) == ((4, 5), (6, 10))
    at = times(run(text, NEW_WEIGHTS[:1], head=WAVE))
    assert (at["F:0"], at["U:0"]) == ((0, 1), (3, 4))
    text = "microbatches 2\nlane 0 0: U:0@0 U:0@1\nlane 0 1: dW:0@0 dW:0@1\nlane 1 0: F:0@0 F:0@1\n"
    text += "lane 2 0: dO:0@0 dO:0@1\n"
    at = times(run(text, NEW_WEIGHTS[:1], Link(overhead_s_per_byte=0.1), head=WAVE))
    assert (at["F:0@1"], at["dO:0@1"]) == ((4, 8), (8, 12))
    assert (at["U:0"], at["U:0@1"]) == ((9, 16), (16, 23))


def test_new_weights_take_no_time_where_nothing_reads_them():
    """There is no dO; F:1 on the other device is of a layer without weights."""
    text = "lane 0 0: F:0 dW:0 U:0\nlane 1 0: F:1\n"
    layers = [LayerCosts(1, 0, 1, update_s=1, weight_bytes=30), LayerCosts(1, 0, 0)]
    at = times(run(text, layers, Link(overhead_s_per_byte=0.1), head=WAVE))
    assert at == {"F:0": (0, 1), "dW:0": (1, 2), "U:0": (2, 3), "F:1": (1, 2)}


def test_synchronous_steps_send_no_new_weights():
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1 dO:0@0 dO:0@1\nlane 1 0: dW:0@0 dW:0@1 U:0@0\n"
    assert times(run(text, NEW_WEIGHTS[:1], Link(overhead_s_per_byte=0.1)))["F:0"] == (0, 1)


SHARED = [
    LayerCosts(4, 1, 6, occupancy=(0.75, 0.5, 0.25)),
    LayerCosts(2, 3, 1, inputs=(), occupancy=(0.75, 0.25, 1.0)),
]


def only(field, layers=SHARED):
    """The layers with seconds for one kind of task."""
    seconds = ("forward_s", "output_grad_s", "weight_grad_s")
    return [dataclasses.replace(x, **{name: 0 for name in seconds if name != field}) for x in layers]


def test_streams_of_one_device_share_it():
    """Forwards need 1.5 devices: two thirds of the speed until F:1 is through; then F:0 alone."""
    timeline = run("lane 0 0: F:0\nlane 0 1: F:1\n", only("forward_s"))
    assert times(timeline) == {"F:0": (0, pytest.approx(5)), "F:1": (0, pytest.approx(3))}
    # dO together need three quarters, dW 1.25.
    assert times(run("lane 0 0: dO:0\nlane 0 1: dO:1\n", only("output_grad_s"))) == {
        "dO:0": (0, 1),
        "dO:1": (0, 3),
    }
    assert times(run("lane 0 0: dW:0\nlane 0 1: dW:1\n", only("weight_grad_s"))) == {
        "dW:0": (0, pytest.approx(6.25)),
        "dW:1": (0, pytest.approx(1.25)),
    }


def test_on_devices_of_their_own_and_without_shares_nothing_slows_down():
    apart, layers = {"F:0": (0, 4), "F:1": (0, 2)}, only("forward_s")
    assert times(run("lane 0 0: F:0\nlane 1 0: F:1\n", layers)) == apart
    plain = [dataclasses.replace(layer, occupancy=None) for layer in layers]
    assert times(run("lane 0 0: F:0\nlane 0 1: F:1\n", plain)) == apart
    # A layer without shares counts whole beside one that has some: 1.75.
    mixed = times(run("lane 0 0: F:0\nlane 0 1: F:1\n", [layers[0], plain[1]]))
    assert mixed["F:1"] == (0, pytest.approx(2 * 1.75))
    for kind, field, shares in (("dO", "output_grad_s", 0.5 + 1), ("dW", "weight_grad_s", 0.25 + 1)):
        costs = only(field, [SHARED[0], dataclasses.replace(SHARED[1], occupancy=None)])
        mixed = times(run(f"lane 0 0: {kind}:0\nlane 0 1: {kind}:1\n", costs))
        first = min(mixed.values(), key=lambda span: span[1])
        assert first == (0, pytest.approx(shares))


def test_of_a_stage_the_largest_share_counts_and_updates_take_all():
    layers = [
        LayerCosts(1, 0, 0, occupancy=(0.125, 1, 1)),
        LayerCosts(1, 0, 0, occupancy=(0.5, 1, 1)),
        LayerCosts(6, 0, 0, inputs=(), occupancy=(0.75, 1, 1)),
    ]
    text = "stage 0: 0-1\nstage 1: 2-2\nlane 0 0: F:0\nlane 0 1: F:1\n"
    assert times(run(text, layers))["F:0"] == (0, pytest.approx(2 * 1.25))
    updates = [
        LayerCosts(0, 0, 1, update_s=2, occupancy=(0.5,) * 3),
        LayerCosts(0, 0, 9, occupancy=(0.5,) * 3),
    ]
    at = times(run("lane 0 0: dW:0 U:0\nlane 0 1: dW:1\n", updates))
    # 1 s side by side, then 1.5 devices are needed.
    assert at["U:0"] == (1, pytest.approx(1 + 2 * 1.5))


def test_transfers_take_no_share():
    """Two devices of two streams: messages travel beside what runs there, in two steps."""
    layers = [
        LayerCosts(2, 0, 0, output_bytes=4, occupancy=(1.0, 1, 1)),
        LayerCosts(2, 0, 0, occupancy=(1.0, 1, 1)),
        LayerCosts(12, 0, 0, inputs=(), occupancy=(1.0, 1, 1)),
    ]
    at = times(run("lane 0 0: F:0\nlane 1 0: F:1\nlane 1 1: F:2\n", layers, Link(0, 1)))
    assert at["F:0"] == (0, 2)
    assert at["F:1"] == (6, pytest.approx(10))
    assert at["F:2"] == (0, pytest.approx(14))


def test_an_unlimited_link_is_no_division_by_zero():
    assert Link().bytes_per_s == math.inf


MACHINE = Link(machines=(0, 0, 0), cores=2)


def test_devices_of_one_machine_share_its_cores():
    """They share them like streams of one device: together 1.5 machines are needed until F:1 is through."""
    at = times(run("lane 0 0: F:0\nlane 1 0: F:1\n", only("forward_s"), MACHINE))
    assert at == {"F:0": (0, pytest.approx(5)), "F:1": (0, pytest.approx(3))}


def test_of_a_machines_cores_a_stage_needs_what_its_layers_need_on_average():
    """Three seconds of half a machine and one of all of it: 0.625; beside the other 1.125 are needed."""
    layers = [
        LayerCosts(3, 0, 0, occupancy=(0.5, 1, 1)),
        LayerCosts(1, 0, 0, occupancy=(1.0, 1, 1)),
        LayerCosts(8, 0, 0, inputs=(), occupancy=(0.5, 1, 1)),
    ]
    text = "stage 0: 0-1\nstage 1: 2-2\nlane 0 0: F:0\nlane 1 0: F:1\n"
    at = times(run(text, layers, MACHINE))
    assert at == {"F:0": (0, pytest.approx(4 * 1.125)), "F:1": (0, pytest.approx(8 + 4 * 0.125))}


def test_devices_of_other_machines_do_not():
    """The third device is on another one, the fourth has not been told of."""
    layers = [LayerCosts(4, 0, 0, inputs=(), occupancy=(1, 1, 1)) for _ in range(4)]
    text = "".join(f"lane {n} 0: F:{n}\n" for n in range(4))
    at = times(run(text, layers, Link(machines=(0, 0, 1), cores=8)))
    assert at == {"F:0": (0, 8), "F:1": (0, 8), "F:2": (0, 4), "F:3": (0, 4)}
    # Its streams share the device that has not been told of.
    layers, two = [*layers, layers[0]], text + "lane 3 1: F:4\n"
    for machines in ((0, 0, 1), (2, 2, 7), (5, 5, 0)):
        at = times(run(two, layers, Link(machines=machines, cores=8)))
        assert at == {"F:0": (0, 8), "F:1": (0, 8), "F:2": (0, 4), "F:3": (0, 8), "F:4": (0, 8)}


def test_a_slow_device_of_a_machine_needs_fewer_of_its_cores():
    """2 s of work take the second device 4 s, with half of the cores; a fast one needs no more than all."""
    text = "lane 0 0: F:0\nlane 1 0: F:1\n"
    layers = [LayerCosts(4, 0, 0, occupancy=(1, 1, 1)), LayerCosts(2, 0, 0, inputs=(), occupancy=(1, 1, 1))]
    slow = times(run(text, layers, dataclasses.replace(MACHINE, speeds=(1, 0.5))))
    assert slow == {"F:0": (0, pytest.approx(6)), "F:1": (0, pytest.approx(6))}
    fast = times(run(text, layers, dataclasses.replace(MACHINE, speeds=(1, 2))))
    assert fast == {"F:0": (0, pytest.approx(5)), "F:1": (0, pytest.approx(2))}


def test_a_task_of_which_nothing_is_known_takes_a_core():
    layers = [LayerCosts(4, 0, 0), LayerCosts(2, 0, 0, inputs=()), LayerCosts(3, 0, 0, inputs=())]
    two, three = "lane 0 0: F:0\nlane 1 0: F:1\n", "lane 0 0: F:0\nlane 1 0: F:1\nlane 2 0: F:2\n"
    assert times(run(two, layers[:2], MACHINE)) == {"F:0": (0, 4), "F:1": (0, 2)}
    # Three on two cores: two thirds of the speed until F:1 has done its 2 s.
    at = times(run(three, layers, MACHINE))
    assert at == {"F:0": (0, pytest.approx(5)), "F:1": (0, pytest.approx(3)), "F:2": (0, pytest.approx(4))}


def test_a_message_within_a_machine_takes_a_core_at_either_end():
    """2 s on the link, beside a task of one core: of two cores three are needed until that is through."""
    layers = [LayerCosts(1, 0, 0, output_bytes=4), LayerCosts(3, 0, 0, output_bytes=4)]
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1\nlane 1 0: F:1@0 F:1@1\n"
    link = Link(0.5, 2.0, machines=(0, 0), cores=2)
    at = times(run(text, layers, link))
    assert at["F:0"] == (0, 1)
    assert at["F:0@1"] == (1, pytest.approx(2.5))
    # The first message has done 1 of its 2 s then; the second one follows, and F:1 waits for its latency.
    assert at["F:1"][0] == pytest.approx(3.5 + 0.5)
    # The message takes all of one core, as the task does; together they take three of five.
    assert times(run(text, layers, dataclasses.replace(link, cores=1)))["F:0@1"] == (1, pytest.approx(3))
    five = times(run(text, layers, dataclasses.replace(link, cores=5)))
    assert (five["F:0@1"], five["F:1"][0]) == ((1, 2), pytest.approx(3.5))
    apart = times(run(text, layers, Link(0.5, 2.0, machines=(0, 1), cores=2)))
    assert (apart["F:0@1"], apart["F:1"]) == ((1, 2), (3.5, 6.5))


def test_a_free_link_still_says_who_shares():
    assert Link(1.0, 2.0, 3.0, (0, 0), 4).free == Link(machines=(0, 0), cores=4)


@pytest.mark.parametrize(("machines", "cores"), [((0, -1), 2), ((0, True), 2), ((0, 0), 0), ((0.5,), 2)])
def test_machines_that_are_refused(machines, cores):
    with pytest.raises(CostError, match="machines are whole numbers, of some cores"):
        Link(machines=machines, cores=cores)
