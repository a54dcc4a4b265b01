"""Groups of processes with a limit of memory: control groups of Linux, of version 1 and 2."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tf_ooo.bench.shared.cpu_groups import has_controller

_TRIED_BYTES = 10**9


@dataclass(frozen=True)
class MemoryGroups(abc.ABC):
    """The groups of this machine; OSError wherever the system refuses.

    Attributes:
        folder: of the system, above all groups.
        limit: file of a group for the bytes that its processes may have together.
        most: file that says the most bytes that they have had at any time.
        swap: file in which 0 keeps them out of the swap space.
    """

    folder: Path
    limit: ClassVar[str]
    most: ClassVar[str]
    swap: ClassVar[str]

    @property
    @abc.abstractmethod
    def is_there(self) -> bool:
        """Whether this machine has groups of this version there."""

    def make(self, name: str) -> Path:
        """The folder of a new group; ``name`` may begin with that of a group above it, and a slash."""
        group = self.folder / name
        group.mkdir()
        return group


class Version1(MemoryGroups):
    """Each group is a folder of the memory controller."""

    limit = "memory.limit_in_bytes"
    most = "memory.max_usage_in_bytes"
    swap = "memory.swappiness"

    @property
    def is_there(self) -> bool:
        return (self.folder / self.limit).exists()


class Version2(MemoryGroups):
    """Groups have limits where the one above, which has no processes itself, passes its controller on."""

    limit = "memory.max"
    most = "memory.peak"
    swap = "memory.swap.max"

    @property
    def is_there(self) -> bool:
        return has_controller(self.folder, "memory")

    def make(self, name: str) -> Path:
        ((self.folder / name).parent / "cgroup.subtree_control").write_text("+memory")
        return super().make(name)


# Where systems have them.  A machine with both versions has the memory's controller in one of them only.
PLACES: tuple[MemoryGroups, ...] = (
    Version1(Path("/sys/fs/cgroup/memory")),
    Version2(Path("/sys/fs/cgroup")),
    Version2(Path("/sys/fs/cgroup/unified")),
)


@dataclass(frozen=True)
class MemoryGroup:
    """Processes that may use so much memory together; the system kills who passes it.

    Attributes:
        folder: its own.
        most: the file in it that says the most that was used.
    """

    folder: Path
    most: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run in the group."""
        enter = f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *command]

    @property
    def most_bytes(self) -> int:
        """The most that was used at any time; pages of files that the processes have read count."""
        return int((self.folder / self.most).read_text())


def groups() -> MemoryGroups:
    """Those of this machine; where it has none, some that are not there."""
    return next((place for place in PLACES if place.is_there), PLACES[0])


def why_not() -> str:
    """Why processes cannot be given a limit of memory here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root for memory groups"
    system = groups()
    if not system.is_there:
        return f"needs memory groups, at {' or '.join(str(place.folder) for place in PLACES[:2])}"
    try:
        with memory_group(f"tf_ooo_bench_{os.getpid()}_try", _TRIED_BYTES) as group:
            counts = (group.folder / group.most).exists()
    except OSError as error:
        return (
            f"needs the right to make memory groups in {system.folder}, as few containers: {error.strerror}"
        )
    return "" if counts else f"needs memory groups with {system.most}: Linux 5.19 or later"


@contextlib.contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group that is not swapped out; its processes must have ended with the block."""
    system = groups()
    folder = system.make(name)
    try:
        (folder / system.limit).write_text(str(limit_bytes))
        if (folder / system.swap).exists():  # a Linux without swap space has none of version 2
            (folder / system.swap).write_text("0")
        yield MemoryGroup(folder, system.most)
    finally:
        folder.rmdir()
