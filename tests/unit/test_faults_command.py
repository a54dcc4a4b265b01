"""``python -m tests.faults``, with runs that take no time: what it draws, counts and prints."""

from __future__ import annotations

from collections import Counter

import pytest
from click.testing import CliRunner

from tests.faults import __main__ as command
from tests.faults.drawing import KINDS, drawn
from tests.faults.running import Outcome
from tests.faults.setups import ALL, FIRST, MODES, SAVINGS, SECOND, VARIANTS, WORKER, Point

SETUPS = [drawn(10**6 + place) for place in range(500)]


def other_bits_with_backups(setup, references):
    """In the place of a run."""
    if setup.training.saving == "backup":
        return Outcome("other bits", f"of {setup.number}")
    return Outcome("good", ended_s=12.5)


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


@pytest.fixture
def no_processes(monkeypatch):
    """One after the other, in this process."""

    def outcomes(setups, references, jobs, until):
        for setup in setups:
            yield setup, other_bits_with_backups(setup, references)

    monkeypatch.setattr(command, "_outcomes", outcomes)


def test_all_are_counted_and_a_failure_says_how_to_repeat_it(no_processes, tmp_path):
    backups = [setup for setup in SETUPS[:40] if setup.training.saving == "backup"]
    file = tmp_path / "table.md"
    ended = CliRunner().invoke(command.main, ["-n", "40", "--keep-going", "--table", str(file)])
    assert ended.exit_code == 1, ended.output
    for setup in backups:
        again = f"python -m tests.faults --number {setup.number}"
        assert f"again: {again} --mode {setup.training.mode}\n" in ended.output
    last = file.read_text().splitlines()[-1]
    assert last == f"| all |  | 40 | 40 | 0 | 12.5 | 0 | 0 | {len(backups)} | 0 |"


def test_the_first_failure_ends_the_run(no_processes):
    first = next(place for place, setup in enumerate(SETUPS) if setup.training.saving == "backup")
    ended = CliRunner().invoke(command.main, ["-n", "500"])
    assert ended.exit_code == 1
    assert f"| all |  | {first + 1} |" in ended.output
