"""Several machines on one: a link of chosen bandwidth, and a share of the CPU for each worker.

Needs root, ``ip``, ``tc`` and ``nsenter`` for the link, and cgroup version 1 for the shares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
# Shorter ones are not kept to exactly: the clock that ends a share ticks every 4 ms.
PERIOD_US = 5_000
# What TensorFlow calls the threads of its executors.
_COMPUTING = "tf_Compute"
_FREE = "free"
_END_S = 5.0
_NO_QUOTA, _LEAST_QUOTA_US = -1, 1000


def why_not(with_link: bool = True) -> str:
    """Why this machine cannot be confined; empty where it can.  ``with_link``: :func:`link` is needed too."""
    if os.geteuid() != 0:
        return "needs root for CPU quotas" + (" and a network namespace" if with_link else "")
    missing = [tool for tool in ("ip", "tc", "nsenter") if with_link and shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2 and util-linux)"
    if not (CPU_GROUPS / "cpu.cfs_quota_us").exists() and not (CPU_GROUPS / "cgroup.procs").exists():
        return f"needs CPU groups of version 1 at {CPU_GROUPS}"
    refused = _refused(with_link)
    if refused:
        return refused
    if with_link and not _may_run_first():
        return "needs the right to run threads first (CAP_SYS_NICE)"
    return ""


def _refused(with_link: bool) -> str:
    """Why root may not make a CPU group or a namespace, as in many containers; empty where it may."""
    name = f"tf_ooo_bench_{os.getpid()}_try"
    try:
        (CPU_GROUPS / name).mkdir()
        (CPU_GROUPS / name).rmdir()
    except OSError as error:
        return f"needs the right to make CPU groups in {CPU_GROUPS}: {error.strerror}"
    if not with_link:
        return ""
    try:
        with link(name, None):
            return ""
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip()
        return f"needs the right to make network namespaces: {said or error}"


def own_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def _may_run_first() -> bool:
    """Whether this process may give a thread a real-time class: a container's root may lack the right."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, *before)
    return True


def skipped(with_link: bool = True) -> bool:
    """Whether a benchmark cannot run here; says why."""
    reason = why_not(with_link)
    if reason:
        click.echo(f"skipped: {reason}")
    return bool(reason)


@contextlib.contextmanager
def link(name: str, bits_per_s: float | None) -> Iterator[list[str]]:
    """A network namespace; yields what to put before a command.  None: as fast as the machine is."""
    _run("ip", "netns", "add", name)
    try:
        # Not "ip netns exec": that mounts a new /sys, without the CPU groups.
        inside = ["nsenter", f"--net=/var/run/netns/{name}"]
        _run(*inside, "ip", "link", "set", "lo", "up")
        if bits_per_s is not None:
            shape = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", "512kb", "latency", "400ms")
            _run(*inside, "tc", "qdisc", "add", "dev", "lo", "root", *shape)
        yield inside
    finally:
        _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def shares(prefix: str, workers: int, cores_each: float) -> Iterator[None]:
    """CPU groups ``<prefix>0``, ``<prefix>1``, ... for :func:`enter`, and one without a quota.

    Where a group has used up its quota, what takes no time waits too, such as handing a tensor over.  So with
    ``cores_each`` 1 there is no quota: the threads of a worker stay on a core of its own.
    """
    groups = [CPU_GROUPS / f"{prefix}{rank}" for rank in range(workers)]
    for rank, group in enumerate(groups):
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        set_share(prefix, rank, cores_each)
        (group / "cpu.shares").write_text("65536")
    groups.append(CPU_GROUPS / f"{prefix}{_FREE}")
    groups[-1].mkdir()
    # More than the others: what communicates must not wait for what computes.
    (groups[-1] / "cpu.shares").write_text("262144")
    try:
        yield
    finally:
        for group in groups:
            _end_all(group)
            with contextlib.suppress(OSError):  # one that cannot be ended
                group.rmdir()


def _end_all(group: Path) -> None:
    """Kills the processes of a group: whoever ends a benchmark early leaves nobody behind."""
    until_s = time.monotonic() + _END_S
    while time.monotonic() < until_s:
        processes = {int(line) for line in (group / "cgroup.procs").read_text().split()} - {os.getpid()}
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def set_share(prefix: str, rank: int, cores: float) -> None:
    """What the group may use of a core; 1: no quota.  ClickException: less than Linux can keep to."""
    quota_us = _NO_QUOTA if cores == 1 else round(PERIOD_US * cores)
    if 0 <= quota_us < _LEAST_QUOTA_US:
        least = _LEAST_QUOTA_US / PERIOD_US
        raise click.ClickException(f"{cores:.2g} of a core: the least share of a worker is {least:.2g}")
    (CPU_GROUPS / f"{prefix}{rank}" / "cpu.cfs_quota_us").write_text(str(quota_us))


def why_no_memory_groups() -> str:
    """Why processes cannot be given a limit of memory here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root for memory groups"
    there = (MEMORY_GROUPS / "memory.limit_in_bytes").exists()
    return "" if there else f"needs memory groups of version 1 at {MEMORY_GROUPS}"


@dataclass(frozen=True)
class MemoryGroup:
    """Processes that may use so much memory together; the system kills who passes it."""

    folder: Path

    def command(self, command: Sequence[str]) -> list[str]:
        """The command, run in the group."""
        enter = f'echo $$ > {self.folder / "cgroup.procs"} && exec "$@"'
        return ["/bin/sh", "-c", enter, "sh", *command]

    @property
    def most_bytes(self) -> int:
        """The most that was used at any time; pages of files that the processes have read count."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())


@contextlib.contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group that is swapped out last; its processes must have ended with the block."""
    folder = MEMORY_GROUPS / name
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (folder / "memory.swappiness").write_text("0")
        yield MemoryGroup(folder)
    finally:
        folder.rmdir()


def threads() -> set[int]:
    """The threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def enter(prefix: str, rank: int, free: set[int]) -> None:
    """Puts this process into the group of ``rank``, its ``free`` threads into that without a quota."""
    own = CPU_GROUPS / f"{prefix}{rank}"
    core = rank if int((own / "cpu.cfs_quota_us").read_text()) == _NO_QUOTA else None
    for thread in threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            ((CPU_GROUPS / f"{prefix}{_FREE}" if thread in free else own) / "tasks").write_text(str(thread))
            if core is not None and thread not in free:
                os.sched_setaffinity(thread, {core})


@contextlib.contextmanager
def lifted(prefix: str, rank: int) -> Iterator[None]:
    """No quota for the group of ``rank`` inside the block: what is not measured need not take long."""
    quota = CPU_GROUPS / f"{prefix}{rank}" / "cpu.cfs_quota_us"
    kept = quota.read_text()
    quota.write_text("-1")
    try:
        yield
    finally:
        quota.write_text(kept)


def enter_computing(prefix: str, rank: int, process: int) -> int:
    """Puts the threads with which TensorFlow computes in another process into the group of ``rank``.

    Those that communicate get no quota, as on a machine whose devices compute.  Returns how many compute.
    """
    computing, moved = CPU_GROUPS / f"{prefix}{rank}" / "tasks", 0
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            computes = (thread / "comm").read_text().startswith(_COMPUTING)
            moved += computes
            (computing if computes else CPU_GROUPS / f"{prefix}{_FREE}" / "tasks").write_text(thread.name)
    return moved


def threads_named(names: tuple[str, ...]) -> set[int]:
    """This process' threads whose names begin so."""
    named = set()
    for thread in threads():
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/self/task/{thread}/comm").read_text().startswith(names):
                named.add(thread)
    return named


def run_first(threads: set[int]) -> None:
    """Threads that communicate run as soon as a message is there, as where devices compute.

    Otherwise Linux lets what computes go on to the end of its turn, 3 to 4 ms, and a message of Horovod's
    waits for several threads, one after the other.  They are in no group: a new one has no time for such
    threads, and Linux gives it some only when it has forgotten the groups of the run before.
    """
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            (CPU_GROUPS / "tasks").write_text(str(thread))
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


def leave_free(prefix: str, process: int) -> None:
    """Puts a process, all its threads, into the group without a quota."""
    (CPU_GROUPS / f"{prefix}{_FREE}" / "cgroup.procs").write_text(str(process))


def keep_memory() -> None:
    """Pages of this process stay where they are: a machine short of memory would take back its code."""
    everything_once_touched = 1 | 2 | 4  # MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT
    ctypes.CDLL(None, use_errno=True).mlockall(everything_once_touched)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
