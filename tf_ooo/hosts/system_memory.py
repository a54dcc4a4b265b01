"""Reads how much memory the system lets a process have, from control groups of version 1 and 2.

No TensorFlow here.  Where the files of Linux are missing, nothing is limited and nothing is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# Names of a group's files, by version of control groups.
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
# Counts of "memory.stat": pages of files not read lately, of those that were, and of mapped ones.
_FILE_PAGES = {
    1: ("total_inactive_file", "total_active_file", "total_mapped_file"),
    2: ("inactive_file", "active_file", "file_mapped"),
}


@dataclass(frozen=True)
class MemoryGroup:
    """Represents a control group that may have less memory than its machine.

    Attributes:
        limit_bytes: the most that its processes may have together; the system ends a process that exceeds it.
        used_bytes: bytes in use, without pages of files that the system would drop.
        name: unique among groups, also of other machines.
        path: as ``/proc/self/cgroup`` names it.
    """

    limit_bytes: int
    used_bytes: int
    name: str
    path: str


@dataclass(frozen=True)
class ReportedLimit:
    """Holds the bytes that a device or this process may have; ``said``: who says so, in words."""

    bytes: int
    said: str


def memory_group(proc: Path = _PROC) -> MemoryGroup | None:
    """Return this process' control group with the lowest limit; None: no limit but the machine's."""
    located = _located(proc)
    if located is None:
        return None
    version, mount, path = located
    machine_bytes = _kilobytes(proc / "meminfo", "MemTotal")
    groups = [
        (limit_bytes, folder)
        for folder in (path, *path.parents)  # limits of all that can be seen hold
        if folder.is_relative_to(mount)
        for limit_bytes in [_number(folder / _LIMIT[version])]
        if limit_bytes is not None and (machine_bytes is None or limit_bytes < machine_bytes)
    ]
    if not groups:
        return None
    limit_bytes, folder = min(groups, key=lambda group: group[0])
    # A folder's number is the same wherever it is mounted, also in containers.
    name = f"{''.join(_lines(proc / 'sys/kernel/random/boot_id'))}/{os.stat(folder).st_ino}"
    within = f"/{folder.relative_to(mount).as_posix()}".removesuffix("/.") or "/"
    return MemoryGroup(limit_bytes, _used_bytes(folder, version), name, within)


def taken_bytes(proc: Path = _PROC) -> int:
    """Return the bytes that this process has in memory, with its mapped files; 0: not known."""
    return _kilobytes(proc / "self/status", "VmRSS") or 0


def available_bytes(proc: Path = _PROC) -> ReportedLimit | None:
    """Return the bytes that this process may still take: the machine's, or its group's if fewer.

    None if the system does not say.  Swap space counts.
    """
    free, swap = (_kilobytes(proc / "meminfo", what) for what in ("MemAvailable", "SwapFree"))
    rows = [] if free is None else [ReportedLimit(free + (swap or 0), "free on this machine")]
    if group := memory_group(proc):
        said = f"left of the {group.limit_bytes} of this process' control group {group.path}"
        rows.append(ReportedLimit(max(0, group.limit_bytes - group.used_bytes), said))
    return min(rows, key=lambda row: row.bytes, default=None)


def _located(proc: Path) -> tuple[int, Path, Path] | None:
    """Return version, mount point and folder of this process' memory group; None: there is none."""
    lines = [line.split(":", 2) for line in _lines(proc / "self/cgroup")]
    mounts = list(_mounts(_lines(proc / "self/mountinfo")))
    for version, kind, controller in ((1, "cgroup", "memory"), (2, "cgroup2", "")):
        paths = [path for _, names, path in lines if controller in names.split(",")]
        served = [
            (root, point)
            for root, point, file_system, options in mounts
            if file_system == kind and (not controller or controller in options.split(","))
        ]
        if paths and served:
            root, point = served[0]
            return version, point, point / _within(paths[0], root)
    return None


def _mounts(lines: Sequence[str]) -> Iterator[tuple[str, Path, str, str]]:
    """Yield for each line of ``mountinfo`` the root, the mount point, its type and options."""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 2:
            yield _plain(fields[3]), Path(_plain(fields[4])), kind[0], kind[2]


def _plain(text: str) -> str:
    """Decode spaces and the like, which are written as ``\\040`` there."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _within(path: str, root: str) -> str:
    """Return a group's path below the mounted root; a container may see only its own group."""
    root = root.rstrip("/")
    if ".." in path.split("/") or not f"{path}/".startswith(f"{root}/"):
        return ""
    return path.removeprefix(root).lstrip("/")


def _used_bytes(folder: Path, version: int) -> int:
    """Return the used bytes that cannot be dropped: active pages of files are dropped too, unless mapped."""
    used = _number(folder / _USED[version]) or 0
    counts = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    inactive, active, mapped = (int(counts.get(name, 0)) for name in _FILE_PAGES[version])
    return max(0, used - max(inactive, inactive + active - mapped))


def _kilobytes(file: Path, what: str) -> int | None:
    """Return the bytes in a line ``what:  123 kB``."""
    for line in _lines(file):
        name, _, value = line.partition(":")
        if name == what:
            return 1024 * int(value.split()[0])
    return None


def _number(file: Path) -> int | None:
    """Return the number in a file; None for "max", no limit."""
    text = "".join(_lines(file))
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
