"""Groups of processes with a limit of memory: what is said where there are none, and a real limit."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.machine import groups
from benchmarks.machine.groups import System
from tests.memory_limited import needs_memory_groups


def test_a_machine_without_groups_says_where_they_would_be(monkeypatch, tmp_path):
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(groups.os, "geteuid", lambda: 0)
    assert groups.why_no_limit() == f"needs memory groups, at {tmp_path}/memory or {tmp_path}"
    monkeypatch.setattr(groups.os, "geteuid", lambda: 1000)
    assert groups.why_no_limit() == "needs root for memory groups"


def test_a_group_of_version_2_that_is_called_memory_is_none_of_version_1(tmp_path):
    (tmp_path / "memory.max").touch()
    assert not System(1, tmp_path, "memory").is_there


def test_version_2_without_the_memorys_controller_does_not_count(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    assert not System(2, tmp_path, "memory").is_there
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert System(2, tmp_path, "memory").is_there


def test_groups_that_cannot_be_made_are_said_and_leave_nothing(monkeypatch, tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # cannot be written
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(groups.os, "geteuid", lambda: 0)
    said = groups.why_no_limit()
    assert said == f"needs the right to make memory groups in {tmp_path}, as few containers: Is a directory"
    assert {path.name for path in tmp_path.iterdir()} == {"cgroup.controllers", "cgroup.subtree_control"}


@needs_memory_groups
def test_a_linux_that_does_not_count_the_most(monkeypatch):
    version = groups.system("memory").version
    limit, _, swap = groups.FILES[version]
    monkeypatch.setitem(groups.FILES, version, (limit, "memory.none", swap))
    assert groups.why_no_limit() == "needs memory groups with memory.none: Linux 5.19 or later"


@needs_memory_groups
def test_who_passes_a_limit_of_memory_is_ended():
    fills = "import sys; kept = bytearray(int(sys.argv[1])); kept[::4096] = kept[::4096]"
    with groups.memory_group(f"tf_ooo_test_{os.getpid()}", 60_000_000) as group:
        small = subprocess.run(group.command([sys.executable, "-c", fills, "10000000"]), check=False)
        large = subprocess.run(group.command([sys.executable, "-c", fills, "90000000"]), check=False)
        assert (small.returncode, large.returncode) == (0, -9)
        assert 10_000_000 < group.most_bytes < 65_000_000  # version 2 counts some beyond a limit
    assert not group.folder.exists()
