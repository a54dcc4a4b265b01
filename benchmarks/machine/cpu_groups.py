"""Groups of threads that have a share of the CPU: control groups of Linux, versions 1 and 2.

A run has groups of its own under a prefix: one for each worker, by rank, and :data:`FREE` for what
communicates.  A process is put into one of them whole, and then single threads of it into others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FREE = "free"
# Shorter periods are not kept to exactly: the clock that ends a share ticks every 4 ms.
PERIOD_US = 5_000
_END_S = 5.0


@dataclass(frozen=True)
class Version1:
    """Each group is a folder of the CPU controller; threads of a process go anywhere.

    Groups have no quota when they are made.  They come before all others of this machine, and :data:`FREE`
    four times as often as the rest: what communicates must not wait for what computes.  OSError wherever the
    system refuses.
    """

    folder: Path
    first_needs = "CAP_SYS_NICE"
    quota_file, threads_file, no_quota = "cpu.cfs_quota_us", "tasks", "-1"

    @property
    def is_there(self) -> bool:
        """Return whether this machine has groups of this version there."""
        # A group of version 2 may be called cpu, too: only version 1 has this file.
        return (self.folder / "tasks").exists()

    def of(self, prefix: str, name: int | str) -> Path:
        """Return the folder of a group."""
        return self.folder / f"{prefix}{name}"

    def all_of(self, prefix: str, names: Sequence[str]) -> list[Path]:
        """Return the folders of all groups, those above others first."""
        return [self.of(prefix, name) for name in names]

    def make(self, prefix: str, names: Sequence[str]) -> None:
        """Make groups without quotas."""
        for name, group in zip(names, self.all_of(prefix, names), strict=True):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.shares").write_text("262144" if name == FREE else "65536")

    def remove(self, prefix: str, names: Sequence[str]) -> None:
        """Kill the processes in groups, but this one, and remove them: nobody is left behind."""
        groups, until_s = self.all_of(prefix, names), time.monotonic() + _END_S
        for group in groups:
            while time.monotonic() < until_s and (processes := _processes(group) - {os.getpid()}):
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.05)
        for group in reversed(groups):
            with contextlib.suppress(OSError):  # its processes cannot be ended, or it was never made
                group.rmdir()

    def quota_us(self, prefix: str, name: int | str) -> int | None:
        """Return what a group has of each :data:`PERIOD_US`; None: no quota."""
        quota = (self.of(prefix, name) / self.quota_file).read_text().split()[0]
        return None if quota == self.no_quota else int(quota)

    def set_quota_us(self, prefix: str, name: int | str, quota_us: int | None) -> None:
        """Set what :meth:`quota_us` returns."""
        quota = self.no_quota if quota_us is None else str(quota_us)
        (self.of(prefix, name) / self.quota_file).write_text(quota)

    def put_thread(self, prefix: str, name: int | str, thread: int) -> None:
        """Put a thread into a group; its process was put into one of the same prefix."""
        (self.of(prefix, name) / self.threads_file).write_text(str(thread))

    def put_process(self, prefix: str, name: int | str, process: int) -> None:
        """Put all threads of a process into a group."""
        (self.of(prefix, name) / "cgroup.procs").write_text(str(process))

    def run_first(self, thread: int) -> None:
        """Give a thread a real-time class: it runs as soon as it can."""
        # In no group: a new one has no time for such threads, and Linux gives it some only when it has
        # forgotten the groups of the run before.
        (self.folder / "tasks").write_text(str(thread))
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


class Version2(Version1):
    """All groups of a prefix are threaded ones below a folder, where threads of a process stay together."""

    # With that option such threads have time of their own, of which these groups have none.
    first_needs = "CAP_SYS_NICE, and a Linux without CONFIG_RT_GROUP_SCHED"
    quota_file, threads_file, no_quota = "cpu.max", "cgroup.threads", "max"

    @property
    def is_there(self) -> bool:
        return has_controller(self.folder, "cpu")

    def of(self, prefix: str, name: int | str) -> Path:
        return self.folder / prefix.rstrip("_") / str(name)

    def all_of(self, prefix: str, names: Sequence[str]) -> list[Path]:
        return super().all_of(prefix, ["", *names])  # the folder says who is in a group; these say nothing

    def make(self, prefix: str, names: Sequence[str]) -> None:
        (self.folder / "cgroup.subtree_control").write_text("+cpu")
        self.make_threaded(prefix, names)
        above = self.of(prefix, "")
        (above / "cgroup.subtree_control").write_text("+cpu")
        (above / "cpu.weight").write_text("10000")
        for name in names:
            (self.of(prefix, name) / "cpu.weight").write_text("10000" if name == FREE else "2500")
            (self.of(prefix, name) / "cpu.max").write_text(f"max {PERIOD_US}")

    def make_threaded(self, prefix: str, names: Sequence[str]) -> None:
        """Make the groups without shares of the CPU."""
        above, *groups = self.all_of(prefix, names)
        above.mkdir()
        for group in groups:
            group.mkdir()
            (group / "cgroup.type").write_text("threaded")

    def run_first(self, thread: int) -> None:
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


# Systems have them there.  A machine with both versions has the CPU's controller in one of them only.
PLACES = (
    Version1(Path("/sys/fs/cgroup/cpu")),
    Version2(Path("/sys/fs/cgroup")),
    Version2(Path("/sys/fs/cgroup/unified")),
)


def groups() -> Version1:
    """Return those of this machine; where it has none, some that are not there."""
    return next((place for place in PLACES if place.is_there), PLACES[0])


def has_controller(folder: Path, name: str) -> bool:
    """Return whether groups of version 2 are in this folder, and the controller of that name is theirs."""
    controllers = folder / "cgroup.controllers"
    return controllers.exists() and name in controllers.read_text().split()


def _processes(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    except OSError:  # there is no such group, or it is a threaded one
        return set()
