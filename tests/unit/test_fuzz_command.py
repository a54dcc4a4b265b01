"""``python -m tests.fuzz``, with a training that takes no time: what it prints, what it survives."""

from __future__ import annotations

import os
import signal

import pytest
from click.testing import CliRunner

from tests.fuzz import worker
from tests.fuzz.__main__ import NUMBERS, main
from tests.fuzz.drawing import drawn
from tests.fuzz.program import program
from tests.fuzz.running import GOOD, Outcome
from tests.fuzz.worker import Worker


def fails_with_dropout(setup):
    """In the place of a training."""
    if "layers.Dropout" in program(setup):
        return Outcome("not the same bits", f"AssertionError: set-up {setup.number}")
    return Outcome(GOOD)


def first_with_dropout(seed):
    numbers = range(seed * NUMBERS, (seed + 1) * NUMBERS)
    return next(number for number in numbers if "layers.Dropout" in program(drawn(number)))


def test_the_first_failure_is_made_minimal_and_ends_the_run(monkeypatch):
    monkeypatch.setattr(worker, "run", fails_with_dropout)
    failing = first_with_dropout(3)
    ended = CliRunner().invoke(main, ["-n", "500", "--seed", "3"])
    assert ended.exit_code == 1, ended.output
    assert f"again: python -m tests.fuzz --number {failing}\n" in ended.output
    assert f"{failing - 3 * NUMBERS + 1} set-ups run, 1 failed" in ended.output
    shown = ended.output.partition("minimal after ")[2]
    applied = [line for line in shown.splitlines() if line.startswith("h = ")]
    assert len(applied) == 1
    assert "layers.Dropout" in applied[0]
    assert "keras.optimizers.SGD(learning_rate=0.02)" in shown or "keras.optimizers.SGD()" in shown


def test_all_are_run_with_keep_going_and_one_by_its_number(monkeypatch):
    monkeypatch.setattr(worker, "run", fails_with_dropout)
    failing = sum("layers.Dropout" in program(drawn(3 * NUMBERS + place)) for place in range(12))
    ended = CliRunner().invoke(main, ["-n", "12", "--seed", "3", "--keep-going"])
    assert f"12 set-ups run, {failing} failed" in ended.output
    assert ended.exit_code == 1
    ended = CliRunner().invoke(main, ["--number", f"{first_with_dropout(8)}"])
    assert "1 set-ups run, 1 failed" in ended.output


@pytest.mark.parametrize(("count", "wanted"), [(2, 1), (3, 2)])
def test_the_process_is_renewed(monkeypatch, count, wanted):
    monkeypatch.setattr(worker, "RENEWED_AFTER", 2)
    monkeypatch.setattr(worker, "run", lambda setup: Outcome(GOOD, str(os.getpid())))
    runner = Worker()
    assert len({runner.run(drawn(number)).text for number in range(count)}) == wanted
    runner.close()


def dies_or_hangs(setup):
    if setup.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if setup.number == 2:
        signal.pause()
    return Outcome(GOOD)


def test_a_step_that_ends_its_process_or_hangs_is_a_failure_and_the_next_runs(monkeypatch):
    monkeypatch.setattr(worker, "run", dies_or_hangs)
    runner, outcomes = Worker(), []
    for number in range(4):
        monkeypatch.setattr(worker, "TIMEOUT_S", 1.0 if number == 2 else 200.0)
        outcomes.append(runner.run(drawn(number)))
    runner.close()
    assert [outcome.kind for outcome in outcomes] == [GOOD, "dies", "hangs", GOOD]
    assert "SIGKILL" in outcomes[1].text
