"""Control groups of Linux, versions 1 and 2: where this machine has them, and limits of memory."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
_TRIED_BYTES = 10**9
# By version, files of a group: the bytes that its processes may have together, the most that they have had at
# any time, and one in which 0 keeps them out of the swap space.
FILES = {
    1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.swappiness"),
    2: ("memory.max", "memory.peak", "memory.swap.max"),
}


@dataclass(frozen=True)
class System:
    """Groups of a version, below a folder of the system."""

    version: int
    folder: Path
    controller: str

    @property
    def is_there(self) -> bool:
        """Return whether the controller is there: on a machine with both versions it is in one of them."""
        if self.version == 1:
            # A group of version 2 may be called as the controller, too: only version 1 has this file.
            return (self.folder / "tasks").exists()
        controllers = self.folder / "cgroup.controllers"
        return controllers.exists() and self.controller in controllers.read_text().split()

    @contextlib.contextmanager
    def made(self, name: str, files: Mapping[str, object], threaded: bool = False) -> Iterator[Path]:
        """Make a group, in whose files this stands; its processes must have ended with the block.

        ``name`` may begin with that of a group above, and a slash; ``threaded``: it is given single threads.
        """
        folder = self.folder / name
        if self.version == 2:  # the group above, which has no processes itself, must pass its controller on
            self.write(folder.parent, {"cgroup.subtree_control": f"+{self.controller}"})
        folder.mkdir()
        try:
            if threaded and self.version == 2:
                (folder / "cgroup.type").write_text("threaded")
            self.write(folder, files)
            yield folder
        finally:
            with contextlib.suppress(OSError):  # its processes cannot be ended
                folder.rmdir()

    def write(self, folder: Path, files: Mapping[str, object]) -> None:
        for file, value in files.items():
            (folder / file).write_text(str(value))


def systems(controller: str) -> tuple[System, ...]:
    """Return where groups of a controller may be."""
    places = (1, ROOT / controller), (2, ROOT), (2, ROOT / "unified")
    return tuple(System(version, folder, controller) for version, folder in places)


def system(controller: str) -> System:
    """Return the groups of this machine; where it has none, some that are not there."""
    return next((place for place in systems(controller) if place.is_there), systems(controller)[0])


def why_not(controller: str) -> str:
    """Say why there can be no groups of a controller; return an empty text where there may be some."""
    if os.geteuid() != 0:
        return f"needs root for {controller} groups"
    if system(controller).is_there:
        return ""
    return f"needs {controller} groups, at {' or '.join(str(of.folder) for of in systems(controller)[:2])}"


class MemoryGroup(NamedTuple):
    """Processes that may use so much memory together; the system kills who passes it."""

    folder: Path
    most: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command as one that is run in the group."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]

    @property
    def most_bytes(self) -> int:
        """The most that was used at any time; pages of files that the processes have read count."""
        return int((self.folder / self.most).read_text())


def why_no_limit() -> str:
    """Say why processes cannot be given a limit of memory here; return an empty text where they can."""
    if reason := why_not("memory"):
        return reason
    try:
        with memory_group(f"benchmarks_{os.getpid()}_try", _TRIED_BYTES) as group:
            counts = (group.folder / group.most).exists()
    except OSError as error:
        folder = system("memory").folder
        return f"needs the right to make memory groups in {folder}, as few containers: {error.strerror}"
    return "" if counts else f"needs memory groups with {group.most}: Linux 5.19 or later"


@contextlib.contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group that is not swapped out (:meth:`System.made`)."""
    groups = system("memory")
    limit, most, swap = FILES[groups.version]
    with groups.made(name, {limit: limit_bytes}) as folder:
        if (folder / swap).exists():  # a Linux without swap space has none of version 2
            groups.write(folder, {swap: 0})
        yield MemoryGroup(folder, most)
