"""Groups of threads that have a share of the CPU: control groups of Linux, versions 1 and 2.

A run has groups of its own under a prefix: one for each worker, by rank, and :data:`FREE` for what
communicates.  A process is put into one of them whole, and then single threads of it into others.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

FREE = "free"
# Shorter periods are not kept to exactly: the clock that ends a share ticks every 4 ms.
PERIOD_US = 5_000
_END_S = 5.0


@dataclass(frozen=True)
class CpuGroups(abc.ABC):
    """The groups of this machine; OSError wherever the system refuses.

    Groups have no quota when they are made.  They come before all others of this machine, and :data:`FREE`
    four times as often as the rest: what communicates must not wait for what computes.

    Attributes:
        folder: of the system, above all groups.
        first_needs: what :meth:`run_first` needs.
    """

    folder: Path
    first_needs: ClassVar[str] = "CAP_SYS_NICE"
    quota_file: ClassVar[str]
    threads_file: ClassVar[str]
    no_quota: ClassVar[str]

    @property
    @abc.abstractmethod
    def is_there(self) -> bool:
        """Whether this machine has groups of this version there."""

    @abc.abstractmethod
    def make(self, prefix: str, names: Sequence[str]) -> None:
        """Make groups without quotas."""

    def remove(self, prefix: str, names: Sequence[str]) -> None:
        """Kill the processes in them, but this one, and remove what was made of them."""
        for name in names:
            _end_all(self.of(prefix, name))
            _remove(self.of(prefix, name))

    def quota_us(self, prefix: str, name: str) -> int | None:
        """Return what a group has of each :data:`PERIOD_US`; None: no quota."""
        quota = (self.of(prefix, name) / self.quota_file).read_text().split()[0]
        return None if quota == self.no_quota else int(quota)

    def set_quota_us(self, prefix: str, name: str, quota_us: int | None) -> None:
        """Set what :meth:`quota_us` returns."""
        quota = self.no_quota if quota_us is None else str(quota_us)
        (self.of(prefix, name) / self.quota_file).write_text(quota)

    def put_thread(self, prefix: str, name: str, thread: int) -> None:
        """Put a thread into a group; its process was put into one of the same prefix."""
        (self.of(prefix, name) / self.threads_file).write_text(str(thread))

    def put_process(self, prefix: str, name: str, process: int) -> None:
        """Put all threads of a process into a group."""
        (self.of(prefix, name) / "cgroup.procs").write_text(str(process))

    def run_first(self, thread: int) -> None:
        """Give a thread a real-time class: it runs as soon as it can."""
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))

    @abc.abstractmethod
    def of(self, prefix: str, name: str) -> Path:
        """Return the folder of a group."""


class Version1(CpuGroups):
    """Each group is a folder of the CPU controller; threads of a process go anywhere."""

    quota_file, threads_file, no_quota = "cpu.cfs_quota_us", "tasks", "-1"

    @property
    def is_there(self) -> bool:
        # A group of version 2 may be called cpu, too: only version 1 has this file.
        return (self.folder / "tasks").exists()

    def make(self, prefix: str, names: Sequence[str]) -> None:
        for name in names:
            group = self.of(prefix, name)
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.shares").write_text("262144" if name == FREE else "65536")

    def run_first(self, thread: int) -> None:
        # In no group: a new one has no time for such threads, and Linux gives it some only when it has
        # forgotten the groups of the run before.
        (self.folder / "tasks").write_text(str(thread))
        super().run_first(thread)

    def of(self, prefix: str, name: str) -> Path:
        return self.folder / f"{prefix}{name}"


class Version2(CpuGroups):
    """All groups of a prefix are threaded ones below a folder, where threads of a process stay together."""

    # With that option such threads have time of their own, of which these groups have none.
    first_needs = "CAP_SYS_NICE, and a Linux without CONFIG_RT_GROUP_SCHED"
    quota_file, threads_file, no_quota = "cpu.max", "cgroup.threads", "max"

    @property
    def is_there(self) -> bool:
        return has_controller(self.folder, "cpu")

    def make(self, prefix: str, names: Sequence[str]) -> None:
        (self.folder / "cgroup.subtree_control").write_text("+cpu")
        self.make_threaded(prefix, names)
        above = self.of(prefix, "")
        (above / "cgroup.subtree_control").write_text("+cpu")
        (above / "cpu.weight").write_text("10000")
        for name in names:
            group = self.of(prefix, name)
            (group / "cpu.weight").write_text("10000" if name == FREE else "2500")
            (group / "cpu.max").write_text(f"max {PERIOD_US}")

    def make_threaded(self, prefix: str, names: Sequence[str]) -> None:
        """Make the groups without shares of the CPU."""
        self.of(prefix, "").mkdir()
        for name in names:
            self.of(prefix, name).mkdir()
            (self.of(prefix, name) / "cgroup.type").write_text("threaded")

    def remove(self, prefix: str, names: Sequence[str]) -> None:
        _end_all(self.of(prefix, ""))  # says who is in a threaded group; these say nothing
        for name in (*names, ""):
            _remove(self.of(prefix, name))

    def of(self, prefix: str, name: str) -> Path:
        return self.folder / prefix.rstrip("_") / name


# Where systems have them.  A machine with both versions has the CPU's controller in one of them only.
PLACES: tuple[CpuGroups, ...] = (
    Version1(Path("/sys/fs/cgroup/cpu")),
    Version2(Path("/sys/fs/cgroup")),
    Version2(Path("/sys/fs/cgroup/unified")),
)


def groups() -> CpuGroups:
    """Return those of this machine; where it has none, some that are not there."""
    return next((place for place in PLACES if place.is_there), PLACES[0])


def has_controller(folder: Path, name: str) -> bool:
    """Whether groups of version 2 are in this folder, and the controller of that name is theirs."""
    controllers = folder / "cgroup.controllers"
    return controllers.exists() and name in controllers.read_text().split()


def _end_all(folder: Path) -> None:
    """Kill the processes of a group: whoever ends a benchmark early leaves nobody behind."""
    until_s = time.monotonic() + _END_S
    while time.monotonic() < until_s and (processes := _processes(folder) - {os.getpid()}):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def _processes(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    except FileNotFoundError:
        return set()


def _remove(folder: Path) -> None:
    """Remove a group, but leave one whose processes cannot be ended."""
    with contextlib.suppress(OSError):
        folder.rmdir()
