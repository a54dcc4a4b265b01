"""Tests what the system lets a process have: real groups of this machine, files as version 2 has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.machine import groups
from tests.memory_limited import needs_memory_groups
from tf_ooo.hosts.system_memory import available_bytes, memory_group, taken_bytes

MIB = 2**20
TELLS = (
    "import json; from tf_ooo.hosts.system_memory import *\n"
    "kept = bytearray(40 << 20); group = memory_group()\n"
    "print(json.dumps([group.limit_bytes, group.used_bytes, group.name, group.path, available_bytes().bytes, "
    "available_bytes().said, taken_bytes()]))"
)


@needs_memory_groups
def test_a_real_group_and_those_above_it():
    name = f"tf_ooo_test_{os.getpid()}"
    with (
        groups.memory_group(name, 300 * MIB),
        groups.memory_group(f"{name}/beside", 400 * MIB) as beside,
        groups.memory_group(f"{name}/within", 400 * MIB) as within,
        groups.memory_group(f"{name}/tight", 200 * MIB) as tight,
    ):
        said = {}
        for group in (beside, within, tight):
            ran = subprocess.run(
                group.command([sys.executable, "-c", TELLS]), capture_output=True, check=True
            )
            said[group.folder.name] = json.loads(ran.stdout)
    assert [row[0] for row in said.values()] == [300 * MIB, 300 * MIB, 200 * MIB]
    assert [row[3] for row in said.values()] == [f"/{name}", f"/{name}", f"/{name}/tight"]
    assert said["beside"][2] == said["within"][2] != said["tight"][2]
    for limit_bytes, used_bytes, _, path, left_bytes, text, taken in said.values():
        assert 40 * MIB < used_bytes < 150 * MIB
        assert abs(limit_bytes - used_bytes - left_bytes) < 5 * MIB
        assert text == f"left of the {limit_bytes} of this process' control group {path}"
        assert 40 * MIB < taken < 150 * MIB


@needs_memory_groups
def test_a_file_that_is_read_again_takes_nothing_away():
    """/var/tmp keeps its files on a disk; those of a /tmp in memory cannot be dropped."""
    reads_twice = (
        "import tempfile\n"
        "with tempfile.TemporaryFile(dir='/var/tmp') as file:\n"
        "    file.write(bytes(60 << 20)); file.flush()\n"
        "    for _ in range(3): file.seek(0); file.read()\n"
        f"    {TELLS.replace(chr(10), chr(10) + '    ')}"
    )
    used = {}
    with groups.memory_group(f"tf_ooo_test_{os.getpid()}", 300 * MIB) as group:
        for what, script in (("nothing", TELLS), ("file", reads_twice)):
            command = group.command([sys.executable, "-c", script])
            ran = subprocess.run(command, capture_output=True, check=True)
            used[what] = json.loads(ran.stdout)[1]
    assert abs(used["file"] - used["nothing"]) < 20 * MIB, used


def test_this_machine():
    assert taken_bytes() > MIB
    assert memory_group() is None or memory_group().limit_bytes > MIB
    assert available_bytes().bytes > MIB


def files(folder, texts):
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """Make a machine of 1 GiB; 500 MiB are free, and 100 MiB of swap space."""
    files(
        tmp_path,
        {
            "meminfo": "MemTotal: 1048576 kB\nMemAvailable: 512000 kB\nSwapFree: 102400 kB\n",
            "sys/kernel/random/boot_id": "b00t\n",
            "self/status": "Name:\tpython\nVmRSS:\t  2048 kB\n",
        },
    )
    return tmp_path


def version_2(proc, path, root="/"):
    groups = proc / "groups of 2"
    mounted = f"35 23 0:28 {root} {groups}".replace("groups of 2", r"groups\040of\0402")
    files(
        proc,
        {
            "self/cgroup": f"0::{path}\n",
            "self/mountinfo": f"22 1 0:2 / / rw - ext4 /dev/sda rw\n{mounted} rw - cgroup2 cgroup2 rw\n",
        },
    )
    return groups


def test_version_2(machine):
    groups = version_2(machine, "/pod/worker")
    files(
        groups,
        {
            "cgroup.controllers": "memory cpu\n",
            "pod/memory.max": f"{300 * MIB}\n",
            "pod/memory.current": f"{200 * MIB}\n",
            "pod/memory.stat": f"anon {90 * MIB}\ninactive_file {80 * MIB}\n",
            "pod/worker/memory.max": "max\n",
            "pod/worker/memory.current": f"{MIB}\n",
        },
    )
    group = memory_group(machine)
    assert (group.limit_bytes, group.used_bytes, group.path) == (300 * MIB, 120 * MIB, "/pod")
    assert group.name.startswith("b00t/")
    assert available_bytes(machine).bytes == 180 * MIB
    assert taken_bytes(machine) == 2 * MIB
    (groups / "pod/memory.max").write_text("max\n")
    assert memory_group(machine) is None
    assert available_bytes(machine).bytes == 600 * MIB


@pytest.mark.parametrize(
    ("stat", "used_bytes"),
    [
        ("inactive_file 80\nactive_file 70\nfile_mapped 30\n", 200 - 120),
        ("inactive_file 80\nactive_file 0\nfile_mapped 30\n", 200 - 80),
        ("inactive_file 150\nactive_file 70\nfile_mapped 0\n", 0),
    ],
)
def test_files_that_were_read_again_are_dropped_unless_they_are_mapped(machine, stat, used_bytes):
    groups = version_2(machine, "/pod")
    files(groups, {"pod/memory.max": "1000\n", "pod/memory.current": "200\n", "pod/memory.stat": stat})
    assert memory_group(machine).used_bytes == used_bytes


@pytest.mark.parametrize(
    ("path", "root"), [("/a/docker/7", "/a/docker/7"), ("/", "/"), ("/../8", "/"), ("/b", "/a")]
)
def test_a_container_that_sees_its_own_group_only(machine, path, root):
    files(version_2(machine, path, root), {"memory.max": f"{50 * MIB}\n"})
    group = memory_group(machine)
    assert (group.limit_bytes, group.used_bytes, group.path) == (50 * MIB, 0, "/")


def test_limits_above_the_machine_are_none(machine):
    files(version_2(machine, "/"), {"memory.max": f"{2000 * MIB}\n"})
    assert memory_group(machine) is None


def test_where_there_are_no_such_files(tmp_path):
    assert memory_group(tmp_path) is None
    assert available_bytes(tmp_path) is None
    assert taken_bytes(tmp_path) == 0
