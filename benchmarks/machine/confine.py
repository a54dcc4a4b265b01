"""Several machines on one: a link of chosen bandwidth, and a share of the CPU for each worker.

Needs root, ``ip``, ``tc`` and ``nsenter`` for the link, and control groups for the shares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import cpu_groups
from benchmarks.machine.cpu_groups import FREE, PERIOD_US, CpuGroups
from benchmarks.processes import BenchmarkError

# What TensorFlow calls the threads of its executors.
_COMPUTING = "tf_Compute"
_LEAST_QUOTA_US = 1000
# A process lives so long in which it is tried whether it may run first; the rate of a link that is tried.
_TRIED_S, _TRIED_BITS_S = 9, 1e9


def why_not(with_link: bool = True) -> str:
    """Say why this machine cannot be confined; return an empty text where it can.

    Args:
        with_link: for runs over a :func:`link`, in which threads that communicate run first.
    """
    if os.geteuid() != 0:
        return "needs root for CPU quotas" + (" and a network namespace" if with_link else "")
    missing = [tool for tool in ("ip", "tc", "nsenter") if with_link and shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2 and util-linux)"
    if not cpu_groups.groups().is_there:
        places = " or ".join(str(place.folder) for place in cpu_groups.PLACES[:2])
        return f"needs the system's CPU groups, at {places}"
    return _refused(with_link)


def _refused(with_link: bool) -> str:
    """Say what root may not do here, as in many containers."""
    prefix, groups = f"benchmarks_{os.getpid()}_try_", cpu_groups.groups()
    try:
        groups.make(prefix, [FREE])
        may_run_first = not with_link or _may_run_first(groups, prefix)
    except OSError as error:
        return f"needs the right to make CPU groups in {groups.folder}, as few containers: {error.strerror}"
    finally:
        groups.remove(prefix, [FREE])
    if not may_run_first:
        return f"needs the right to run threads first ({groups.first_needs})"
    try:
        with link(prefix, _TRIED_BITS_S) if with_link else contextlib.nullcontext():
            return ""
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip()
        return f"needs network namespaces whose links can be slowed (tc, sch_tbf): {said or error}"


def _may_run_first(groups: CpuGroups, prefix: str) -> bool:
    """Whether a thread of a group may get a real-time class, which a container's root may lack."""
    with subprocess.Popen(["sleep", str(_TRIED_S)]) as tried:
        try:
            groups.put_process(prefix, FREE, tried.pid)
            groups.run_first(tried.pid)
        except OSError:
            return False
        finally:
            tried.kill()
    return True


def own_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def link(name: str, bits_per_s: float | None) -> Iterator[list[str]]:
    """Make a network namespace; yield what to put before a command.  None: as fast as the machine is."""
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
    """Make CPU groups ``<prefix>0``, ``<prefix>1``, ... for :func:`enter`, and one without a quota.

    Where a group has used up its quota, what takes no time waits too, such as handing a tensor over.  So with
    ``cores_each`` 1 there is no quota: the threads of a worker stay on a core of its own.
    """
    groups, names = cpu_groups.groups(), [*map(str, range(workers)), FREE]
    try:
        groups.make(prefix, names)
        for rank in range(workers):
            set_share(prefix, rank, cores_each)
        yield
    finally:
        groups.remove(prefix, names)


def set_share(prefix: str, rank: int, cores: float) -> None:
    """Set what the group may use of a core; 1: no quota.

    Raises:
        BenchmarkError: that is less than Linux can keep to.
    """
    quota_us = None if cores == 1 else round(PERIOD_US * cores)
    if quota_us is not None and quota_us < _LEAST_QUOTA_US:
        least = _LEAST_QUOTA_US / PERIOD_US
        raise BenchmarkError(f"{cores:.2g} of a core: the least share of a worker is {least:.2g}")
    cpu_groups.groups().set_quota_us(prefix, str(rank), quota_us)


def threads(named: tuple[str, ...] = ("",)) -> set[int]:
    """Return the threads of this process whose names begin so."""
    return {thread for thread, name in _named_threads(os.getpid()) if name.startswith(named)}


def _named_threads(process: int) -> Iterator[tuple[int, str]]:
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            yield int(thread.name), (thread / "comm").read_text()


def enter(prefix: str, rank: int, free: set[int]) -> None:
    """Put this process into the group of ``rank``, its ``free`` threads into that without a quota."""
    groups = cpu_groups.groups()
    own = sorted(os.sched_getaffinity(0))
    core = own[rank] if groups.quota_us(prefix, str(rank)) is None else None
    groups.put_process(prefix, FREE, os.getpid())
    for thread in threads() - free:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            groups.put_thread(prefix, str(rank), thread)
            if core is not None:
                os.sched_setaffinity(thread, {core})


@contextlib.contextmanager
def lifted(prefix: str, rank: int) -> Iterator[None]:
    """Let the group of ``rank`` have no quota inside the block: what is not measured need not take long."""
    groups = cpu_groups.groups()
    kept_us = groups.quota_us(prefix, str(rank))
    groups.set_quota_us(prefix, str(rank), None)
    try:
        yield
    finally:
        groups.set_quota_us(prefix, str(rank), kept_us)


def enter_computing(prefix: str, rank: int, process: int) -> int:
    """Put the threads with which TensorFlow computes in another process into the group of ``rank``.

    Those that communicate get no quota, as on a machine whose devices compute.  Return how many compute.
    """
    moved = 0
    leave_free(prefix, process)
    for thread, name in _named_threads(process):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            if name.startswith(_COMPUTING):
                cpu_groups.groups().put_thread(prefix, str(rank), thread)
                moved += 1
    return moved


def run_first(threads: set[int]) -> None:
    """Let threads that communicate run as soon as a message is there, as where devices compute.

    Otherwise Linux lets what computes go on to the end of its turn, 3 to 4 ms, and a message of Horovod's
    waits for several threads, one after the other.
    """
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cpu_groups.groups().run_first(thread)


def leave_free(prefix: str, process: int) -> None:
    """Put a process, all its threads, into the group without a quota."""
    cpu_groups.groups().put_process(prefix, FREE, process)


def keep_memory() -> None:
    """Keep the pages of this process where they are: a machine short of memory would take back its code."""
    everything_once_touched = 1 | 2 | 4  # MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT
    ctypes.CDLL(None, use_errno=True).mlockall(everything_once_touched)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
