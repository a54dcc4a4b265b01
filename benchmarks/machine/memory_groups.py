"""Groups of processes with a limit of memory: control groups of Linux, versions 1 and 2."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine.cpu_groups import has_controller

_TRIED_BYTES = 10**9


@dataclass(frozen=True)
class MemoryGroups:
    """The groups of this machine.

    Attributes:
        folder: of the system, above all groups.
        passes_on: version 2: the group above, which has no processes itself, must pass its controller on.
        limit: file of a group for the bytes that its processes may have together.
        most: file that says the most bytes that they have had at any time.
        swap: file in which 0 keeps them out of the swap space.
    """

    folder: Path
    passes_on: bool
    limit: str
    most: str
    swap: str

    @property
    def is_there(self) -> bool:
        """Return whether this machine has groups of this version there."""
        file_is_there = (self.folder / self.limit).exists()
        return has_controller(self.folder, "memory") if self.passes_on else file_is_there


def version1(folder: Path) -> MemoryGroups:
    """Return groups that are folders of the memory controller."""
    files = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.swappiness")
    return MemoryGroups(folder, False, *files)


def version2(folder: Path) -> MemoryGroups:
    """Return groups of all controllers."""
    return MemoryGroups(folder, True, "memory.max", "memory.peak", "memory.swap.max")


# Systems have them there.  A machine with both versions has the memory's controller in one of them only.
PLACES = (
    version1(Path("/sys/fs/cgroup/memory")),
    version2(Path("/sys/fs/cgroup")),
    version2(Path("/sys/fs/cgroup/unified")),
)


@dataclass(frozen=True)
class MemoryGroup:
    """Processes that may use so much memory together; the system kills who passes it."""

    folder: Path
    most: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command, run in the group."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]

    @property
    def most_bytes(self) -> int:
        """The most that was used at any time; pages of files that the processes have read count."""
        return int((self.folder / self.most).read_text())


def groups() -> MemoryGroups:
    """Return those of this machine; where it has none, some that are not there."""
    return next((place for place in PLACES if place.is_there), PLACES[0])


def why_not() -> str:
    """Say why processes cannot be given a limit of memory here; return an empty text where they can."""
    if os.geteuid() != 0:
        return "needs root for memory groups"
    system = groups()
    if not system.is_there:
        return f"needs memory groups, at {' or '.join(str(place.folder) for place in PLACES[:2])}"
    needs = f"needs the right to make memory groups in {system.folder}, as few containers"
    try:
        with memory_group(f"benchmarks_{os.getpid()}_try", _TRIED_BYTES) as group:
            counts = (group.folder / group.most).exists()
    except OSError as error:
        return f"{needs}: {error.strerror}"
    return "" if counts else f"needs memory groups with {system.most}: Linux 5.19 or later"


@contextlib.contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group that is not swapped out; its processes must have ended with the block.

    ``name`` may begin with that of a group above, and a slash.
    """
    system = groups()
    folder = system.folder / name
    if system.passes_on:
        (folder.parent / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    try:
        (folder / system.limit).write_text(str(limit_bytes))
        if (folder / system.swap).exists():  # a Linux without swap space has none of version 2
            (folder / system.swap).write_text("0")
        yield MemoryGroup(folder, system.most)
    finally:
        folder.rmdir()
