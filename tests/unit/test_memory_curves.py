"""Bytes alive after each instant, on each device, worked out by hand with sizes that are all different."""

from __future__ import annotations

import numpy as np
import pytest

from tf_ooo import LayerCosts, Link, Schedule, simulate
from tf_ooo.planning.model.memory import MemoryCurve

HEAD = "tf_ooo schedule v1\nmode pipeline\npolicy byhand\n"
WAVE = HEAD.replace("pipeline", "layerpipe") + "asynchronous yes\n"


def curves(text, layers, head=HEAD, steps=1):
    """For each device what is alive after each instant at which that changes."""
    timeline = simulate(Schedule.from_text(head + text), layers, steps=steps)
    found = []
    for curve in timeline.memory:
        alive = dict(zip(curve.time_s.tolist(), curve.alive_bytes.tolist(), strict=True))
        found.append(list(alive.items()))
        # Bytes that are freed at an instant are free for what starts then.
        assert curve.peak_bytes == max(alive.values(), default=0)
        assert curve.time_s.tolist() == sorted(curve.time_s.tolist())
    assert timeline.peak_bytes == [max((size for _, size in curve), default=0) for curve in found]
    return found


def test_peaks_are_whole_bytes():
    def peak(*sizes):
        return MemoryCurve(np.arange(len(sizes)), np.array(sizes, float)).peak_bytes

    assert peak() == 0
    assert peak(3, 7, 5) == 7
    assert peak(7.0000001) == 7  # rounding of shares
    assert peak(7.25) == 8


def test_two_stages():
    layers = [
        LayerCosts(1, 2, 3, 0.5, activation_bytes=10, weight_bytes=100, slot_bytes=7, summand_bytes=3),
        LayerCosts(2, 4, 1, 0.25, 20, 50, weight_grad_bytes=5, slot_bytes=9, summand_bytes=4),
    ]
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1 dO:0@0 dW:0@0 dO:0@1 dW:0@1 U:0@0\n"
    text += "lane 1 0: F:1@0 dO:1@0 F:1@1 dO:1@1 dW:1@0 dW:1@1 U:1@0\n"
    # dW:0 from 9 to 12 and from 15 to 18, dW:1 from 13 to 14 and to 15; see test_two_stages_by_hand.
    assert curves(text, layers) == [
        [(0, 117), (1, 127), (9, 230), (12, 217), (15, 220), (18, 207), (18.5, 107)],
        [(0, 59), (1, 79), (7, 84), (13, 123), (14, 118), (15, 109), (15.25, 59)],
    ]


def test_each_step_has_a_gradient_of_its_own():
    """F for 1 s, dW for 2, U for 4: two steps."""
    layers = [LayerCosts(1, 0, 2, update_s=4, activation_bytes=5, weight_bytes=100)]
    assert curves("lane 0 0: F:0 dW:0 U:0\n", layers, steps=2) == [
        [(0, 105), (1, 205), (3, 200), (7, 105), (8, 205), (10, 200), (14, 100)]
    ]


@pytest.mark.parametrize(
    ("last", "until"), [("", 3), (" comm:0", 3 + 6), (" comm:0 U:0", 3 + 6 + 4), (" U:0", 3 + 4)]
)
def test_a_gradient_stays_until_the_last_that_reads_it(last, until):
    layers = [LayerCosts(1, 0, 2, update_s=4 if "U" in last else 0, weight_bytes=6)]
    schedule = Schedule.from_text(f"{HEAD}workers 2\nlane 0 0: F:0 dW:0{last}\n")
    # Two rounds of three bytes at one a second.
    curve = simulate(schedule, layers, Link(0, 1)).memory[0]
    assert (curve.time_s[-1], curve.alive_bytes.tolist()) == (until, [6, 12, 6])


def test_layers_of_a_stage_add_up_but_for_what_is_added_up_one_by_one():
    layers = [
        LayerCosts(1, 0, 1, activation_bytes=1, weight_bytes=10, slot_bytes=100, summand_bytes=1000),
        LayerCosts(1, 0, 1, activation_bytes=2, weight_bytes=20, slot_bytes=200, summand_bytes=3000),
        LayerCosts(1, 0, 1, activation_bytes=4, weight_bytes=40, slot_bytes=400, summand_bytes=2000),
    ]
    text = "stage 0: 0-1\nstage 1: 2-2\nlane 0 0: F:0 F:1 dW:1 dW:0\n"
    assert curves(text, layers) == [
        [
            (0, 70 + 700 + 3),
            (2, 770 + 7),
            (3, 777 + 40 + 2000),
            (4, 770 + 3 + 30 + 3000),
            (6, 770),
        ]
    ]


def test_what_is_freed_when():
    """With dO and dW what dW needs stays; with one of them all goes with it; with none with F."""
    layers = [LayerCosts(1, 2, 4, activation_bytes=10, weight_grad_bytes=3)]
    assert curves("lane 0 0: F:0 dO:0 dW:0\n", layers) == [[(0, 10), (3, 3), (7, 0)]]
    no_dw, no_do = LayerCosts(1, 2, 0, activation_bytes=10), LayerCosts(1, 0, 4, activation_bytes=10)
    assert curves("lane 0 0: F:0 dO:0\n", [no_dw]) == [[(0, 10), (3, 0)]]
    assert curves("lane 0 0: F:0 dW:0\n", [no_do]) == [[(0, 10), (5, 0)]]
    assert curves("lane 0 0: F:0\n", [LayerCosts(1, 0, 0, activation_bytes=10)]) == [[(0, 10), (1, 0)]]
    # Side by side: each stage by what it has.
    layers = [LayerCosts(1, 0, 2, activation_bytes=10), LayerCosts(1, 0, 0, activation_bytes=100)]
    assert curves("lane 0 0: F:0 F:1 dW:0\n", layers) == [[(0, 10), (1, 110), (2, 10), (4, 0)]]


def test_parts_free_their_shares():
    layers = [LayerCosts(1, 8, 1, activation_bytes=24, weight_grad_bytes=4)]
    text = "parts dO:0: 0.25 0.75\nlane 0 0: F:0 dO:0 dO:0.1 dW:0\n"
    assert curves(text, layers) == [[(0, 24), (3, 19), (9, 4), (10, 0)]]


def test_parts_free_their_shares_where_they_come_first_of_all():
    layers = [LayerCosts(1, 8, 1, activation_bytes=24, weight_grad_bytes=4)]
    text = "parts dO:0: 0.25 0.75\nlane 0 0: dO:0 dO:0.1 dW:0\n"
    assert curves(text, layers) == [[(0, 24), (2, 19), (8, 4), (9, 0)]]


def test_a_backward_pass_alone_finds_everything_stored():
    layers = [LayerCosts(1, 2, 4, activation_bytes=10, weight_grad_bytes=3)]
    text = "microbatches 2\nlane 0 0: dO:0@0 dW:0@0 dO:0@1 dW:0@1\n"
    assert curves(text, layers) == [[(0, 20), (2, 13), (6, 10), (8, 3), (12, 0)]]
    twice = curves(text, layers, steps=2)[0]
    assert (twice[0], twice[-1]) == ((0, 40), (24, 0))
    # Not what no task of a stage reads; on the device of dO, or of dW alone.
    layers = [LayerCosts(1, 0, 0, activation_bytes=100), LayerCosts(1, 1, 0, activation_bytes=7)]
    layers += [LayerCosts(1, 0, 1, activation_bytes=5, weight_bytes=30)]
    assert curves("lane 1 0: dO:1\nlane 2 0: dW:2\n", layers) == [[], [(0, 7), (1, 0)], [(0, 65), (1, 30)]]


def test_dw_on_another_device_has_its_own_copy_of_what_it_reads():
    """Weights are where F, dO and U are, optimizer state where U is, or F."""
    layers = [LayerCosts(1, 2, 4, 0, 10, 100, weight_grad_bytes=3, slot_bytes=1000, summand_bytes=50)]
    text = "lane 0 0: F:0 dO:0\nlane 1 0: dW:0\n"
    assert curves(text, layers) == [[(0, 1110), (3, 1103), (7, 1100)], [(3, 153), (7, 0)]]
    assert curves(text + "lane 2 0: U:0\n", layers)[2] == [(0, 1100)]
    apart = curves("lane 0 0: F:0\nlane 2 0: dO:0\nlane 1 0: dW:0 U:0\n", layers)
    assert apart == [[(0, 110), (3, 103), (7, 100)], [(0, 1100), (3, 1253), (7, 1100)], [(0, 100)]]
    two = "microbatches 2\nlane 0 0: F:0@0 F:0@1 dO:0@0 dO:0@1 dW:0@1\nlane 1 0: dW:0@0\n"
    # dW of one micro-batch elsewhere, from 4 to 8: the gradient, until 10, is where that of the first is.
    assert curves(two, layers)[1] == [(4, 153), (6, 203), (8, 150), (10, 0)]


IN_TURN = "microbatches 3\nlane 0 0: F:0@0 F:0@1 dW:0@0 U:0@0 F:0@2 dW:0@1 U:0@1 dW:0@2 U:0@2\n"


def test_older_weights_stay_until_the_last_that_read_them_is_done():
    """Forwards of the first two micro-batches, until 8, read what the update at 5 replaces."""
    layers = [LayerCosts(1, 0, 2, update_s=1, weight_bytes=100)]
    assert curves(IN_TURN, layers, head=WAVE) == [
        [(0, 100), (2, 200), (5, 200), (6, 300), (8, 200), (9, 300), (11, 200), (12, 100)]
    ]


def test_older_weights_are_on_all_devices_that_read_them():
    """dO on device 2 reads weights as F does; dW and U, on device 1, do not keep old ones."""
    layers = [LayerCosts(1, 1, 2, update_s=1, weight_bytes=100)]
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1\nlane 1 0: dW:0@0 U:0@0 dW:0@1 U:0@1\n"
    found = curves(text + "lane 2 0: dO:0@0 dO:0@1\n", layers, head=WAVE)
    # dW from 2 to 4 and 5 to 7; the old version from 5 to 7.
    assert found[0] == found[2] == [(0, 100), (5, 200), (7, 100)]
    assert found[1] == [(0, 100), (2, 200), (5, 200), (8, 100)]


def test_without_updates_a_gradient_lasts_as_long_as_its_dw():
    layers = [LayerCosts(1, 0, 2, weight_bytes=100)]
    text = "microbatches 2\nlane 0 0: F:0@0 F:0@1 dW:0@0 dW:0@1\n"
    assert curves(text, layers, head=WAVE) == [[(0, 100), (2, 200), (4, 200), (6, 100)]]
    backward = "microbatches 2\nlane 0 0: dW:0@0\nlane 0 1: dW:0@1 U:0@0 U:0@1\n"
    assert curves(backward, [LayerCosts(0, 0, 2, weight_bytes=100)], head=WAVE) == [[(0, 300), (2, 100)]]


def test_updates_of_compiled_layers_hold_new_weights_and_slots_beside_the_old_ones():
    """Weights of 5 bytes and slots of 3; U from 3 s to 7 s."""
    layers = [LayerCosts(1, 0, 2, update_s=4, weight_bytes=5, slot_bytes=3, compiled=True)]
    assert curves("lane 0 0: F:0 dW:0 U:0\n", layers) == [[(0, 8), (1, 13), (3, 21), (7, 8)]]


def test_what_runs_again_is_freed_in_between():
    """F leaves 9 bytes, 6 of which are freed after it and there again from the start of dO (at 3 s) on."""
    layers = [LayerCosts(1, 2, 3, activation_bytes=9, recomputed_bytes=6), LayerCosts(2, 0, 0)]
    text = "lane 0 0: F:0@0 F:1@0 dO:0@0 dW:0@0\n"
    assert curves(text, layers) == [[(0, 3), (3, 9), (8, 0)]]
    parts = [LayerCosts(1, 8, 1, activation_bytes=24, weight_grad_bytes=4, recomputed_bytes=8)]
    text = "parts dO:0: 0.25 0.75\nlane 0 0: F:0 dO:0 dO:0.1 dW:0\n"
    assert curves(text, parts) == [[(0, 16), (1, 18), (3, 19), (9, 4), (10, 0)]]
