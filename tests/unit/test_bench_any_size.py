"""``tf-ooo bench any-size``: what is said of its rows, and memory groups."""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

from tests.memory_limited import needs_memory_groups
from tf_ooo.bench.any_size import command
from tf_ooo.bench.any_size.command import any_size, text_of, verdict_of
from tf_ooo.bench.shared import memory_groups
from tf_ooo.bench.shared.memory_groups import Version1, Version2

OVER = {
    "runs_on": "4 workers", "weights_bytes": 400_000_000, "losses": [2.0, 1.0], "step_s": [3.0, 1.0],
    "limit_bytes": 600_000_000, "used_bytes": [500_000_000, 550_000_000],
}  # fmt: skip
WHOLE = {"runs_on": "one process", "weights_bytes": 400_000_000, "losses": [2.0, 1.001], "step_s": [1.0, 1.0]}
KILLED = {"runs_on": "one process", "status": -9, "limit_bytes": 600_000_000, "used_bytes": [600_000_000]}


def test_a_line_for_each_row():
    assert text_of(OVER) == (
        "4 workers, 600 MB each: weights and Adam's slots 1200 MB, used at most 550 MB; "
        "losses 2.000000 1.000000"
    )
    assert text_of(WHOLE).startswith(
        "one process, no limit: weights and Adam's slots 1200 MB; losses 2.000000"
    )
    assert text_of(KILLED) == "one process, 600 MB each: ended with status -9, used at most 600 MB"


def test_the_verdict():
    assert verdict_of([OVER, WHOLE, KILLED]) == (
        "weights and slots are 2.00 times what a worker may use; losses differ by 1.0e-03 (relative) at "
        "most; one process under that limit ended with status -9"
    )
    assert verdict_of([OVER, WHOLE, {**KILLED, "status": 0}]).endswith("trained, too")


def test_without_groups_it_is_skipped(monkeypatch):
    monkeypatch.setattr(memory_groups.os, "geteuid", lambda: 1000)
    assert CliRunner().invoke(any_size).output == "skipped: needs root for memory groups\n"


def test_a_machine_without_groups_says_where_they_would_be(monkeypatch, tmp_path):
    places = (Version1(tmp_path / "one"), Version2(tmp_path / "two"))
    monkeypatch.setattr(memory_groups, "PLACES", places)
    monkeypatch.setattr(memory_groups.os, "geteuid", lambda: 0)
    assert memory_groups.why_not() == f"needs memory groups, at {tmp_path}/one or {tmp_path}/two"


def test_a_group_of_version_2_that_is_called_memory_is_none_of_version_1(tmp_path):
    (tmp_path / "memory.max").touch()
    assert not Version1(tmp_path).is_there


def test_version_2_without_the_memorys_controller_does_not_count(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    assert not Version2(tmp_path).is_there
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert Version2(tmp_path).is_there


def test_groups_that_cannot_be_made_are_said_and_leave_nothing(monkeypatch, tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # cannot be written
    monkeypatch.setattr(memory_groups, "PLACES", (Version2(tmp_path),))
    monkeypatch.setattr(memory_groups.os, "geteuid", lambda: 0)
    said = memory_groups.why_not()
    assert said == f"needs the right to make memory groups in {tmp_path}, as few containers: Is a directory"
    assert {path.name for path in tmp_path.iterdir()} == {"cgroup.controllers", "cgroup.subtree_control"}


@needs_memory_groups
def test_a_linux_that_does_not_count_the_most(monkeypatch):
    monkeypatch.setattr(type(memory_groups.groups()), "most", "memory.none")
    assert memory_groups.why_not() == "needs memory groups with memory.none: Linux 5.19 or later"


@needs_memory_groups
def test_who_passes_a_limit_of_memory_is_ended():
    fills = "import sys; kept = bytearray(int(sys.argv[1])); kept[::4096] = kept[::4096]"
    with memory_groups.memory_group(f"{command._PREFIX}test", 60_000_000) as group:
        small = subprocess.run(group.command([sys.executable, "-c", fills, "10000000"]), check=False)
        large = subprocess.run(group.command([sys.executable, "-c", fills, "90000000"]), check=False)
        assert (small.returncode, large.returncode) == (0, -9)
        assert 10_000_000 < group.most_bytes < 65_000_000  # version 2 counts some beyond a limit
    assert not group.folder.exists()
