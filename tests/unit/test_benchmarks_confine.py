"""Shares of the CPU: real groups of the version that this machine has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import confine, groups
from benchmarks.machine.confine import FREE, Shares
from benchmarks.machine.groups import System
from benchmarks.processes import BenchmarkError

WHY_NOT = confine.why_not(with_link=False)
confined = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")
PREFIX = f"tf_ooo_test_{os.getpid()}"


def test_a_machine_without_groups_says_where_they_would_be(monkeypatch, tmp_path):
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert confine.why_not(with_link=False) == (f"needs cpu groups, at {tmp_path}/cpu or {tmp_path}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert confine.why_not(with_link=False) == "needs root for cpu groups"


def test_a_group_of_version_2_that_is_called_cpu_is_none_of_version_1(tmp_path):
    (tmp_path / "cgroup.procs").touch()
    assert not System(1, tmp_path, "cpu").is_there


def test_version_2_without_the_cpus_controller_does_not_count(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    assert not System(2, tmp_path, "cpu").is_there
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    assert System(2, tmp_path, "cpu").is_there


def test_groups_that_cannot_be_made_are_said_and_leave_nothing(monkeypatch, tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "cgroup.subtree_control").mkdir()  # cannot be written
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    said = confine.why_not(with_link=False)
    assert said == f"needs the right to make cpu groups in {tmp_path}, as few containers: Is a directory"
    assert {path.name for path in tmp_path.iterdir()} == {"cgroup.controllers", "cgroup.subtree_control"}


@confined
def test_shares_are_set_and_lifted():
    groups = Shares(PREFIX)
    file, none = ("cpu.cfs_quota_us", "-1") if groups.system.version == 1 else ("cpu.max", "max")

    def quota(name):
        return (groups.system.folder / PREFIX / name / file).read_text().split()[0]

    with groups.made(2, 0.4):
        assert [quota(name) for name in ("0", "1", FREE)] == ["2000", "2000", none]
        groups.set_share(1, 0.2)
        with groups.lifted(1):
            assert quota("1") == none
        assert quota("1") == "1000"
        with pytest.raises(BenchmarkError, match=r"0\.1 of a core: the least share of a worker is 0\.2"):
            groups.set_share(1, 0.1)
    with pytest.raises(FileNotFoundError):
        quota("0")


# A thread that computes, as TensorFlow calls it, one that communicates, and the main one; says their ids.
_PROCESS = """
import ctypes, sys, threading, time
def named(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    sys.stdout.write(f"{name.decode()} {threading.get_native_id()}\\n")
    sys.stdout.flush()
    time.sleep(100)
for name in (b"tf_Compute", b"grpc"):
    threading.Thread(target=named, args=(name,), daemon=True).start()
named(b"main")
"""


class ThreadsOnly(System):
    """Groups of version 2 also where version 1 has the CPU's controller: without shares of the CPU."""

    def write(self, folder, files):
        """There are no such files."""


# This machine has these.
ALL_GROUPS = [
    Shares(PREFIX, place if place.version == 1 else ThreadsOnly(2, place.folder, "cpu"))
    for place in groups.systems("cpu")
    if (place.is_there if place.version == 1 else (place.folder / "cgroup.controllers").exists())
]


@confined
@pytest.mark.parametrize("groups", ALL_GROUPS, ids=lambda groups: type(groups.system).__name__)
def test_threads_that_compute_get_a_share_and_nobody_is_left_behind(groups):
    with groups.made(1, 0.5):
        process = subprocess.Popen([sys.executable, "-c", _PROCESS], stdout=subprocess.PIPE, text=True)
        threads = dict(process.stdout.readline().split() for _ in range(3))
        for _ in range(2):  # threads that have come since
            assert groups.enter_computing([process.pid]) == 1
        assert {name: group_of(process.pid, thread) for name, thread in threads.items()} == {
            "tf_Compute": "0",
            "grpc": FREE,
            "main": FREE,
        }
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
    assert not list(groups.system.folder.glob(f"{PREFIX}*"))


def group_of(process, thread):
    """The last part of its group's name."""
    lines = Path(f"/proc/{process}/task/{thread}/cgroup").read_text().splitlines()
    (path,) = {line.split(":", 2)[2] for line in lines if PREFIX in line}
    return path.rpartition("/")[2]
