"""Several machines on one: a link of chosen bandwidth, and a share of the CPU for each worker.

Needs root, ``ip``, ``tc`` and ``nsenter`` for the link, and control groups for the shares.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import cpu_groups
from benchmarks.machine.cpu_groups import FREE, PERIOD_US
from benchmarks.processes import BenchmarkError

# TensorFlow calls the threads of its executors so.
_COMPUTING = ("tf_Compute",)
_LEAST_QUOTA_US = 1000
# A process lives so long in which it is tried whether it may run first.
_TRIED_S = 9


def why_not(with_link: bool = True) -> str:
    """Say why this machine cannot be confined, as many containers; return an empty text where it can.

    Args:
        with_link: for runs over a :func:`link`, in which threads that communicate run first.
    """
    if os.geteuid() != 0:
        return "needs root for CPU quotas" + (" and a network namespace" if with_link else "")
    missing = [tool for tool in ("ip", "tc", "nsenter") if with_link and shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2 and util-linux)"
    groups, prefix = cpu_groups.groups(), f"benchmarks_{os.getpid()}_try_"
    if not groups.is_there:
        places = " or ".join(str(place.folder) for place in cpu_groups.PLACES[:2])
        return f"needs the system's CPU groups, at {places}"
    needs = f"the right to make CPU groups in {groups.folder}, as few containers"
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(shares(prefix, 0, 1.0))
            if with_link:
                needs = f"the right to run threads first ({groups.first_needs})"
                tried = stack.enter_context(subprocess.Popen(["sleep", str(_TRIED_S)]))
                stack.callback(tried.kill)
                groups.put_process(prefix, FREE, tried.pid)
                groups.run_first(tried.pid)
                needs = "network namespaces whose links can be slowed (tc, sch_tbf)"
                slow(stack.enter_context(link(prefix)), 1e9)
    except OSError as error:
        return f"needs {needs}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        return f"needs {needs}: {error.stderr.strip() or error}"
    return ""


def own_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def link(name: str) -> Iterator[list[str]]:
    """Make a network namespace, as fast as the machine is; yield what to put before a command."""
    _run("ip", "netns", "add", name)
    try:
        # Not "ip netns exec": that mounts a new /sys, without the CPU groups.
        inside = ["nsenter", f"--net=/var/run/netns/{name}"]
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        _run("ip", "netns", "delete", name)


def slow(inside: Sequence[str], bits_per_s: float) -> None:
    """Slow a :func:`link` down."""
    shape = ("tbf", "rate", f"{bits_per_s:.0f}bit", "burst", "512kb", "latency", "400ms")
    _run(*inside, "tc", "qdisc", "add", "dev", "lo", "root", *shape)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


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
    cpu_groups.groups().set_quota_us(prefix, rank, quota_us)


def threads(named: tuple[str, ...] = ("",), process: int | None = None) -> set[int]:
    """Return the threads of a process, by default this one, whose names begin so."""
    found = set()
    for thread in Path(f"/proc/{process or os.getpid()}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(named):
                found.add(int(thread.name))
    return found


def enter(prefix: str, rank: int, free: set[int]) -> None:
    """Put this process into the group of ``rank``, its ``free`` threads into that without a quota."""
    groups = cpu_groups.groups()
    own = sorted(os.sched_getaffinity(0))
    core = own[rank] if groups.quota_us(prefix, rank) is None else None
    leave_free(prefix, os.getpid())
    for thread in threads() - free:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            groups.put_thread(prefix, rank, thread)
            if core is not None:
                os.sched_setaffinity(thread, {core})


@contextlib.contextmanager
def lifted(prefix: str, rank: int) -> Iterator[None]:
    """Let the group of ``rank`` have no quota inside the block: what is not measured need not take long."""
    groups = cpu_groups.groups()
    kept_us = groups.quota_us(prefix, rank)
    groups.set_quota_us(prefix, rank, None)
    try:
        yield
    finally:
        groups.set_quota_us(prefix, rank, kept_us)


def enter_computing(prefix: str, rank: int, process: int) -> int:
    """Put the threads with which TensorFlow computes in another process into the group of ``rank``.

    Those that communicate get no quota, as on a machine whose devices compute.  Return how many compute.
    """
    leave_free(prefix, process)
    computing = threads(_COMPUTING, process)
    for thread in computing:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cpu_groups.groups().put_thread(prefix, rank, thread)
    return len(computing)


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
