"""Makespans, bubbles, links and memory worked out by hand, with unequal costs."""

from __future__ import annotations

import pytest

from tf_ooo import LayerCosts, Link, Schedule, plan, simulate
from tf_ooo.errors import CostError, ScheduleError
from tf_ooo.planning.simulation.simulator import validate

HEAD = "tf_ooo schedule v1\nmode pipeline\npolicy byhand\n"
# F, dO, dW, U of two layers
LAYERS = [
    LayerCosts(1, 2, 3, update_s=0.5, activation_bytes=10, weight_bytes=100, output_bytes=8),
    LayerCosts(2, 4, 1, update_s=0.25, activation_bytes=20, weight_bytes=50, weight_grad_bytes=5),
]
TWO = HEAD + "microbatches 2\nlane 0 0: F:0@0 F:0@1 dO:0@0 dW:0@0 dO:0@1 dW:0@1 U:0@0\n"
TWO += "lane 1 0: F:1@0 dO:1@0 F:1@1 dO:1@1 dW:1@0 dW:1@1 U:1@0\n"


def times(timeline):
    return {f"{e.task}+{e.step}" if e.step else str(e.task): (e.start_s, e.end_s) for e in timeline.events}


def test_two_stages_by_hand():
    timeline = simulate(Schedule.from_text(TWO), LAYERS)
    assert times(timeline) == {
        "F:0": (0, 1), "F:0@1": (1, 2),
        "F:1": (1, 3), "dO:1": (3, 7), "F:1@1": (7, 9), "dO:1@1": (9, 13), "dW:1": (13, 14),
        "dW:1@1": (14, 15), "U:1": (15, 15.25),
        "dO:0": (7, 9), "dW:0": (9, 12), "dO:0@1": (13, 15), "dW:0@1": (15, 18), "U:0": (18, 18.5),
    }  # fmt: skip
    assert timeline.makespan_s == 18.5
    assert timeline.busy_s == [1 + 1 + 2 + 3 + 2 + 3 + 0.5, 2 + 4 + 2 + 4 + 1 + 1 + 0.25]
    assert timeline.bubble_fraction == pytest.approx(1 - (12.5 + 14.25) / (2 * 18.5))


def test_memory_by_hand():
    timeline = simulate(Schedule.from_text(TWO), LAYERS)
    # Device 0: weights, their gradient from 9 on, both micro-batches until 12.
    assert timeline.peak_bytes[0] == 100 + 100 + 10 + 10
    # Device 1: dO(0) leaves 5 of 20 bytes; F(1) adds 20; from 13 on 5 + 5 and the gradient.
    assert timeline.peak_bytes[1] == max(50 + 5 + 20, 50 + 50 + 5 + 5)


def test_link_sends_one_message_at_a_time():
    # 8 bytes at 2 bytes/s keep the link busy for 4 s; they arrive 0.5 s later.
    timeline = simulate(Schedule.from_text(TWO), LAYERS, Link(0.5, 2))
    at = times(timeline)
    assert at["F:1"] == (1 + 4 + 0.5, 7.5)
    assert at["dO:1"] == (7.5, 11.5)
    # F:0@1 ends at 2, but the link is busy until 5.
    sent = [(m.start_s, m.end_s, m.source, m.target) for m in timeline.messages]
    assert sent[:2] == [(1, 5, 0, 1), (5, 9, 0, 1)]
    assert at["dO:0"][0] == 11.5 + 4 + 0.5
    assert timeline.message_bytes == 4 * 8


def test_messages_take_time_from_who_sends_and_from_who_receives():
    # 8 bytes of 0.25 s: 2 s at each end, and the message is there at once.
    link = Link(overhead_s_per_byte=0.25)
    at = times(simulate(Schedule.from_text(TWO), LAYERS, link))
    assert (at["F:0"], at["F:0@1"]) == ((0, 1 + 2), (3, 6))
    assert (at["F:1"], at["dO:1"]) == ((3, 3 + 2 + 2), (7, 7 + 4 + 2))
    assert (at["dO:0"], at["dW:0"]) == ((13, 13 + 2 + 2), (17, 20))
    assert at["U:0"] == (30, 30.5)
    with pytest.raises(CostError, match="overhead_s_per_byte"):
        Link(overhead_s_per_byte=-1)


def test_a_message_that_two_tasks_read_is_received_once():
    text = HEAD.replace("pipeline", "layerpipe") + "microbatches 1\nasynchronous yes\n"
    text += "lane 0 0: F:0 dO:0 dW:0 U:0\nlane 1 0: F:1 dO:1 dW:1 U:1\n"
    skip = [LayerCosts(1, 1, 1, output_bytes=8), LayerCosts(1, 1, 1, inputs=(0,))]
    at = times(simulate(Schedule.from_text(text), skip, Link(overhead_s_per_byte=0.25)))
    assert at["F:1"] == (3, 6)
    assert at["dO:1"] == (6, 9)


def test_new_weights_take_time_where_dw_is_apart():
    """10 bytes of 0.1 s: 1 s from U, and 1 s from F, on another device; dO beside F gets them with it."""
    text = HEAD.replace("pipeline", "layerpipe") + "microbatches 1\nasynchronous yes\n"
    text += "lane 0 0: F:0 dO:0\nlane 1 0: dW:0 U:0\n"
    layers = [LayerCosts(1, 1, 1, update_s=1, weight_bytes=10)]
    at = times(simulate(Schedule.from_text(text), layers, Link(overhead_s_per_byte=0.1)))
    assert at == {"F:0": (0, 2), "dO:0": (2, 3), "dW:0": (3, 4), "U:0": (4, 6)}


def test_fused_backward_sends_after_the_weight_gradient():
    lanes = "lane 0 0: F:0 dO:0 dW:0 U:0\nlane 1 0: F:1 dO:1 dW:1 U:1\n"
    apart = simulate(Schedule.from_text(HEAD + lanes), LAYERS)
    fused = simulate(Schedule.from_text(HEAD + "fused_backward yes\n" + lanes), LAYERS)
    assert times(apart)["dO:0"][0] == 1 + 2 + 4
    assert times(fused)["dO:0"][0] == 1 + 2 + 4 + 1


def test_the_next_step_waits_for_each_layers_own_update():
    text = HEAD.replace("pipeline", "data_parallel") + "workers 2\nlane 0 0: F:0 F:1 dO:1 dO:0 dW:0 dW:1\n"
    schedule = Schedule.from_text(text + "lane 0 1: comm:0 comm:1\nlane 0 2: U:0 U:1\n")
    # A ring of two: two rounds of half the bytes each: 10 s and 5 s.
    timeline = simulate(schedule, LAYERS, Link(0, 10), steps=2)
    at = times(timeline)
    assert at["comm:0"] == (12, 22)
    assert at["comm:1"] == (22, 27)
    assert at["F:0+1"] == (22.5, 23.5)
    assert at["F:1+1"] == (27.25, 29.25)
    # F:1 of the next step ends at 29.25; dO:1, dO:0, dW:0 take 9, comm 15, U:1 0.25: until 53.5.
    assert timeline.steady_step_s == pytest.approx(53.5 - 27.25)


def test_skip_connection_is_a_message_of_its_own():
    layers = [
        LayerCosts(1, 1, 1, output_bytes=4),
        LayerCosts(1, 1, 1, output_bytes=6),
        LayerCosts(1, 1, 1, inputs=(0, 1)),
    ]
    lanes = "".join(f"lane {s} 0: F:{s} dO:{s} dW:{s}\n" for s in range(3))
    timeline = simulate(Schedule.from_text(HEAD + lanes), layers, Link(0, 2))
    assert {(m.source, m.target, m.size_bytes) for m in timeline.messages} == {
        (0, 1, 4), (1, 2, 6), (0, 2, 4), (2, 1, 6), (1, 0, 4), (2, 0, 4),
    }  # fmt: skip
    # F:2 waits for 1 + 2 + 1 + 3; dO:0 for dO:1, which is there 2 s after 11 + 1.
    assert times(timeline)["F:2"][0] == 7
    assert times(timeline)["dO:0"][0] == 7 + 1 + 1 + 3 + 1 + 2


def test_after_pins_a_task():
    text = HEAD.replace("pipeline", "single_device") + "after dW:1: F:0 steps 1\n"
    lanes = "lane 0 0: F:0 F:1 dO:1 dO:0 dW:0 U:0\nlane 0 1: dW:1 U:1\n"
    at = times(simulate(Schedule.from_text(text + lanes), LAYERS, steps=2))
    assert at["F:0+1"] == (12.5, 13.5)
    assert at["dW:1"] == (13.5, 14.5)
    assert at["F:1+1"][0] == 14.75


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("dW:1@1 ", ""), "missing: dW:1@1"),
        (("U:0@0", ""), "missing: U:0"),
        (("F:0@1 dO:0@0", "dO:0@0 F:0@1 F:5@0"), "costs are missing for layer 2"),
    ],
)
def test_incomplete_schedules_are_refused(change, message):
    with pytest.raises((ScheduleError, CostError), match=message):
        simulate(Schedule.from_text(TWO.replace(*change)), LAYERS)


def test_a_deadlock_names_the_circle():
    lanes = "lane 0 0: F:0@0 dO:0@0 F:0@1 dO:0@1 dW:0@0 dW:0@1\n"
    lanes += "lane 1 0: F:1@0 F:1@1 dO:1@0 dO:1@1 dW:1@0 dW:1@1\n"
    schedule = Schedule.from_text(HEAD + "microbatches 2\n" + lanes)
    with pytest.raises(ScheduleError, match="cycle") as caught:
        validate(schedule)
    assert "dO:0 on lane 0 0 waits for dO:1 on lane 1 0 (the output gradient)" in str(caught.value)
    assert "F:0@1, which stands" not in str(caught.value).split("waits for")[0]
    with pytest.raises(ScheduleError, match="cycle"):
        simulate(schedule, LAYERS)


@pytest.mark.parametrize("field", ["forward_s", "output_grad_s", "weight_grad_s", "activation_bytes"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", None])
def test_bad_costs_name_the_field(field, value):
    with pytest.raises(CostError, match=field):
        LayerCosts(**{"forward_s": 1, "output_grad_s": 1, "weight_grad_s": 1, field: value})


def test_missing_costs_name_the_layer():
    with pytest.raises(CostError, match="layer 1: costs are missing"):
        plan(layers=[LAYERS[0], None], schedule="in_order")
    with pytest.raises(CostError, match="layer 1: reads layer 1"):
        plan(layers=[LAYERS[0], LayerCosts(1, 1, 1, inputs=(1,))], schedule="in_order")


def test_optimizer_state_is_there_all_the_time_and_has_no_gradient():
    layers = [LayerCosts(1, 1, 1, weight_bytes=100, slot_bytes=30, activation_bytes=5)]
    assert simulate(plan(layers=layers, schedule="in_order"), layers).peak_bytes == [100 + 100 + 30 + 5]
