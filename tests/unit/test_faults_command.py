"""Tests what ``python -m tests.faults`` draws."""

from __future__ import annotations

from collections import Counter

from tests.faults.drawing import KINDS, drawn
from tests.faults.setups import ALL, FIRST, MODES, SAVINGS, SECOND, VARIANTS, WORKER, Point

SETUPS = [drawn(10**6 + place) for place in range(500)]


def test_the_five_hundred_of_seed_1_have_everything_in_them():
    assert {setup.training.mode for setup in SETUPS} == set(MODES)
    assert {setup.training.saving for setup in SETUPS} == set(SAVINGS)
    assert {setup.training.variant for setup in SETUPS} == set(range(len(VARIANTS)))
    faults = [setup.fault for setup in SETUPS]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.target for fault in faults} == {FIRST, SECOND, WORKER, ALL}
    points = {fault.when.where for fault in faults if isinstance(fault.when, Point)}
    of_batches = {"train_batch_begin", "train_batch_end", "data"}
    assert points == {*of_batches, "epoch_begin", "epoch_end", "train_end", "saving"}
    timed = Counter(isinstance(fault.when, float) for fault in faults if fault.kind == "kill")
    assert min(timed[True], timed[False]) > 10


def test_no_fault_is_one_that_cannot_be():
    for setup in SETUPS:
        mode, fault = MODES[setup.training.mode], setup.fault
        assert fault.target != SECOND or mode.ranks == 2
        assert fault.target != WORKER or mode.workers == 1
        assert fault.kind != "stop" or mode.ranks == 2 or fault.target == WORKER
        if isinstance(fault.when, Point) and fault.when.where == "data":
            assert VARIANTS[setup.training.variant][1] != "arrays"


def test_a_number_and_a_mode_say_which_set_up_it_is():
    assert SETUPS[7] == drawn(10**6 + 7)
    of_mode = drawn(10**6 + 7, "compiled")
    assert (of_mode.number, of_mode.training.mode) == (SETUPS[7].number, "compiled")
