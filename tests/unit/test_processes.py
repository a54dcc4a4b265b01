"""The plug-in that runs each test file in a process of its own, also where one ends or hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]

NOTES = """
import os, time
from pathlib import Path
import pytest

def note(name):
    with open({folder!r} + "/" + name, "a") as file:
        file.write(f"{{os.getpid()}} ")
"""


@pytest.fixture
def pytest_on(tmp_path):
    """Runs pytest with the plug-in on files of that text: its exit status and output."""

    def run(*arguments: str, **files: str) -> tuple[int, str]:
        for name, text in files.items():
            (tmp_path / f"test_{name}.py").write_text(NOTES.format(folder=str(tmp_path)) + text)
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "--rootdir", str(tmp_path), *arguments, str(tmp_path)],
            capture_output=True, text=True, timeout=120, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def pids(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().split()


def test_a_file_has_a_process_and_a_test_may_have_its_own(pytest_on, tmp_path):
    status, said = pytest_on(
        first="""
def test_one(): note("first")
def test_two(): note("first")
@pytest.mark.alone
def test_three(): note("alone")
@pytest.mark.alone
def test_four(): note("alone")
""",
        second="def test_five(): note('second')",
    )
    assert status == 0, said
    first, second, alone = (pids(tmp_path, name) for name in ("first", "second", "alone"))
    assert len(first) == 2
    assert len(set(first)) == 1
    assert len(alone) == len(set(alone)) == 2
    assert len({*first, *second, *alone}) == 4


def test_an_assertion_that_fails_on_one_rank_fails_the_test(pytest_on, tmp_path):
    status, said = pytest_on(
        ranks="""
import json
def rank(): return json.loads(os.environ["TF_CONFIG"])["task"]["index"]

@pytest.mark.ranks(2, "collectives")
def test_equal():
    note(f"rank{rank()}")
    print("here is", rank())
    assert rank() == 0

@pytest.mark.ranks(2, "collectives")
def test_after():
    note(f"rank{rank()}")

def test_alone_again():
    assert "TF_CONFIG" not in os.environ
"""
    )
    assert status == 1
    assert "1 failed, 2 passed" in said
    assert "assert 1 == 0" in said
    assert "here is 1" in said
    assert "this is rank 1 of 2" in said
    # The ranks of the test that failed are not used again.
    assert all(len(set(pids(tmp_path, f"rank{rank}"))) == 2 for rank in (0, 1))


def test_a_process_that_dies_or_hangs_fails_its_test_only(pytest_on):
    status, said = pytest_on(
        ends="""
def test_dies():
    print("last words", flush=True)
    os.kill(os.getpid(), 9)

def test_exits(): os._exit(7)

@pytest.mark.timeout(1)
def test_hangs(): time.sleep(60)

def test_goes_on(): pass
"""
    )
    assert status == 1
    assert "3 failed, 1 passed" in said
    assert "its process ended with SIGKILL" in said
    assert "last words" in said
    assert "its process ended with 7" in said
    assert "no end after 1 s" in said
    assert "in test_hangs" in said


def test_a_process_that_dies_before_its_children_is_seen_to_have_died(pytest_on, tmp_path):
    status, said = pytest_on(
        ends="""
@pytest.mark.timeout(60)
def test_dies():
    if not os.fork():
        note("child")
        time.sleep(600)
    while not Path({folder!r}, "child").exists(): time.sleep(0.01)
    os.kill(os.getpid(), 9)
""".replace("{folder!r}", repr(str(tmp_path)))
    )
    assert status == 1
    assert "its process ended with SIGKILL" in said
    (child,) = pids(tmp_path, "child")
    assert _has_ended(int(child))


def _has_ended(pid: int) -> bool:
    """Waits for a process that was killed; one that nobody has asked for yet is a zombie."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_failures_around_a_test_and_ranks_that_differ_are_failures(pytest_on):
    status, said = pytest_on(
        around="""
import json

@pytest.fixture
def torn():
    yield
    raise ValueError("in teardown")

@pytest.fixture(scope="module")
def never(): raise ValueError("in a fixture")

def test_teardown(torn): pass
def test_fixture(never): pass

@pytest.mark.ranks(2, "collectives")
def test_skipped_on_one():
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
        pytest.skip("only here")

def test_goes_on(): pass
"""
    )
    assert status == 1
    assert "1 failed, 2 passed, 2 errors" in said
    assert "in teardown" in said
    assert "in a fixture" in said
    assert "ranks end differently" in said


@pytest.mark.parametrize(("reason", "status"), [("needs a GPU", 0), ("not in the mood", 1)])
def test_a_skip_for_a_reason_of_ones_own_fails_a_strict_run(pytest_on, reason, status):
    text = f"@pytest.mark.skip(reason={reason!r})\ndef test_one(): pass\ndef test_two(): pass"
    assert pytest_on(skips=text)[0] == 0
    strictly, said = pytest_on("--strict-skips", skips=text)
    assert strictly == status, said
    assert ("SKIP NOT ALLOWED" in said) == bool(status)


def test_skipping_a_whole_file_is_a_skip_too(pytest_on):
    text = "pytest.importorskip('no_such_module', reason='it is not there')"
    status, said = pytest_on("--strict-skips", other="def test_two(): pass", skips=text)
    assert status == 1
    assert "SKIP NOT ALLOWED (tests/skips.py): test_skips.py" in said


def _adds_up(a: int, b: int) -> int:
    print("adding")
    return a + b


def _fails() -> None:
    print("about to fail")
    raise KeyError("this one")


def test_results_and_errors_come_back_from_a_fork():
    assert forked.result_of(_adds_up, 2, 3) == 5
    assert len(forked.result_of(bytes, 1_000_000)) == 1_000_000
    with pytest.raises(KeyError, match="this one") as raised:
        forked.result_of(_fails)
    assert "about to fail" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="ended with 3"):
        forked.result_of(os._exit, 3)


def test_a_fork_is_like_a_script():
    process = forked.start(lambda: print(input() + "!", os.environ["X_TEST"]), environment={"X_TEST": "x"})
    process.stdin.write("hello\n")
    assert process.communicate(timeout=20)[0] == "hello! x\n"
    assert process.returncode == 0
    failing = forked.start(_fails)
    assert "KeyError" in failing.communicate(timeout=20)[0]
    assert failing.returncode == 1
    sleeping = forked.start(__import__("time").sleep, 60)
    sleeping.kill()
    assert sleeping.wait(20) == -9


@pytest.mark.alone
def _cannot_say_why_it_fails():
    sys.stderr = None
    sys.stdout = object()  # whose flush fails, after all else
    raise ValueError("nobody hears of it")


def test_a_forked_process_never_returns_to_who_forked_it():
    mine = os.getpid()
    process = forked.start(_cannot_say_why_it_fails)
    assert os.getpid() == mine
    process.communicate(20)
    assert process.returncode == 1


def test_a_process_that_has_run_ops_is_not_forked():
    import tensorflow as tf

    assert not forked.runtime_started()
    tf.constant(1.0)
    assert forked.runtime_started()
    with pytest.raises(RuntimeError, match="cannot be forked"):
        forked.start(print)
