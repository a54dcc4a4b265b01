"""The command and the child processes of all random tests, with cases that take no time."""

from __future__ import annotations

import functools
import importlib
import os
import signal

import pytest
from click.testing import CliRunner

from tests.harness.children import Children, Outcome, Setting
from tests.harness.command import NUMBERS, Harness
from tests.harness.drawing import Cases

SEED = 3 * NUMBERS


@functools.cache
def cases(mode):
    """A number, and some others, of which the large ones are faults."""
    return Cases(lambda draw: (draw.number, [draw.below(100) for _ in range(draw.below(4))]))


def large_ones_fail(case):
    return Outcome("too large" if any(value > 90 for value in case[1]) else "good", f"of {case}")


def failing(count):
    numbers = range(SEED, SEED + count)
    return [number for number in numbers if large_ones_fail(cases("").drawn(number)).failed]


HARNESS = Harness(
    "tests.nothing",
    "Numbers.",
    cases,
    lambda mode, jobs: Children(large_ones_fail, jobs=jobs),
    group=lambda case: f"{len(case[1])} numbers",
    modes=("first", "second"),
    shrinks=True,
)


def output_of(*arguments, status, harness=HARNESS):
    ended = CliRunner().invoke(harness.command(), [*arguments])
    assert ended.exit_code == status, ended.output
    return ended.output


def test_the_first_failure_is_made_minimal_and_ends_the_run():
    first = failing(100)[0]
    said = output_of("-n", "100", "--seed", "3", status=1)
    assert f"again: python -m tests.nothing --number {first}\n" in said
    assert f"minimal:\n({first}, [91])\n" in said
    assert f"{first - SEED + 1} cases run, 1 failed" in said


def test_all_are_run_with_keep_going_and_one_by_its_number(tmp_path):
    table = tmp_path / "table.md"
    numbers = failing(50)
    said = output_of("-n50", "--seed=3", "--keep-going", "--jobs=2", f"--table={table}", status=1)
    assert f"50 cases run, {len(numbers)} failed" in said
    assert all(f"--number {number}\n" in said for number in numbers)
    assert table.read_text().splitlines()[-1] == f"| all | 50 | {50 - len(numbers)} | {len(numbers)} |"
    said = output_of(f"--number={numbers[-1]}", "--mode=second", status=1)
    assert "1 cases run, 1 failed" in said
    assert f"again: python -m tests.nothing --number {numbers[-1]} --mode second\n" in said


def test_some_groups_only_are_run_and_shown():
    said = output_of("-n40", "--only=0 numbers", "--show", status=0)
    chosen = [n for n in range(NUMBERS, NUMBERS + 40) if not cases("").drawn(n)[1]]
    assert f"{len(chosen)} cases run, 0 failed" in said
    assert all(f"{number}: ({number}, [])" in said for number in chosen)


def number_of_process(case):
    return Outcome("good", str(os.getpid()))


@pytest.mark.parametrize(("count", "wanted"), [(2, 1), (3, 2)])
def test_the_process_is_renewed(count, wanted):
    children = Children(number_of_process, renewed_after=2)
    assert len({children.run(number).text for number in range(count)}) == wanted
    children.close()


def test_cases_of_other_settings_have_processes_of_their_own():
    children = Children(number_of_process, lambda case: Setting(name=case % 2 and "odd"))
    pids = [children.run(number).text for number in range(4)]
    children.close()
    assert pids[:2] == pids[2:]
    assert pids[0] != pids[1]


def dies_or_hangs(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 2:
        signal.pause()
    return Outcome("good")


def test_a_case_that_ends_its_process_or_hangs_is_a_failure_and_the_next_runs():
    children = Children(dies_or_hangs, limit_s=lambda number: 1.0 if number == 2 else 200.0)
    outcomes = dict(children.outcomes((f"case {number}", number) for number in range(4)))
    children.close()
    assert [outcome.kind for outcome in outcomes.values()] == ["good", "dies", "hangs", "good"]
    assert "SIGKILL" in outcomes["case 1"].text


@pytest.mark.parametrize("module", ["fuzz", "fuzz.kinds", "faults", "malformed"])
def test_each_command_has_no_case_to_run(module):
    main = importlib.import_module(f"tests.{module}.__main__").main
    ended = CliRunner().invoke(main, ["-n", "0"])
    assert (ended.exit_code, ended.output.splitlines()[-1]) == (0, "0 cases run, 0 failed")
