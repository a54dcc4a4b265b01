"""Groups of processes with a limit of memory: control groups of Linux, versions 1 and 2."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import control_groups

_TRIED_BYTES = 10**9
# By version, files of a group: the bytes that its processes may have together, the most that they have had at
# any time, and one in which 0 keeps them out of the swap space.
FILES = {
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.swappiness"),
    2: ("memory.max", "memory.peak", "memory.swap.max"),
}


class MemoryGroup(NamedTuple):
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


def why_not() -> str:
    """Say why processes cannot be given a limit of memory here; return an empty text where they can."""
    if reason := control_groups.why_not("memory"):
        return reason
    try:
        with memory_group(f"benchmarks_{os.getpid()}_try", _TRIED_BYTES) as group:
            counts = (group.folder / group.most).exists()
    except OSError as error:
        folder = control_groups.system("memory").folder
        return f"needs the right to make memory groups in {folder}, as few containers: {error.strerror}"
    return "" if counts else f"needs memory groups with {group.most}: Linux 5.19 or later"


@contextlib.contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group that is not swapped out; its processes must have ended with the block.

    ``name`` may begin with that of a group above, and a slash.
    """
    system = control_groups.system("memory")
    folder, (limit, most, swap) = system.folder / name, FILES[system.version]
    if system.version == 2:  # the group above, which has no processes itself, must pass its controller on
        (folder.parent / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    try:
        (folder / limit).write_text(str(limit_bytes))
        if (folder / swap).exists():  # a Linux without swap space has none of version 2
            (folder / swap).write_text("0")
        yield MemoryGroup(folder, most)
    finally:
        folder.rmdir()
