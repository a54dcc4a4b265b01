"""Several machines on one: a link of chosen bandwidth, and a share of the CPU for each worker.

Needs root, ``ip``, ``tc`` and ``nsenter`` for the link, and control groups for the shares.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import groups
from benchmarks.processes import BenchmarkError

FREE = "free"
# Shorter periods are not kept to exactly: the clock that ends a share ticks every 4 ms.
PERIOD_US, _LEAST_QUOTA_US = 5_000, 1_000
_END_S = 5.0
# TensorFlow calls the threads of its executors so.
_COMPUTING = ("tf_Compute",)
# A process lives so long in which it is tried whether it may run first.
_TRIED_S = 9
_FIRST_NEEDS = {
    1: "CAP_SYS_NICE",
    # With that option such threads have time of their own, of which these groups have none.
    2: "CAP_SYS_NICE, and a Linux without CONFIG_RT_GROUP_SCHED",
}


class Shares:
    """Groups of threads of a run, in a folder of this name: one for each worker, by rank, and :data:`FREE`.

    A process is put into one of them whole, and then single threads of it into others.  FREE has no quota and
    comes four times as often as the rest, and all come before others of this machine: what communicates must
    not wait for what computes.  OSError wherever the system refuses.
    """

    def __init__(self, prefix: str, system: groups.System | None = None) -> None:
        self.system = system or groups.system("cpu")
        self._folder, self._is_first = self.system.folder / prefix, self.system.version == 1
        self._quota_file, self._threads_file, self._no_quota = (
            ("cpu.cfs_quota_us", "tasks", "-1") if self._is_first else ("cpu.max", "cgroup.threads", "max")
        )

    @contextlib.contextmanager
    def made(self, workers: int, cores_each: float) -> Iterator[None]:
        """Make the groups; all processes in them but this one end with the block.

        Where a group has used up its quota, what takes no time waits too, such as handing a tensor over.  So
        with ``cores_each`` 1 there is no quota: the threads of a worker stay on a core of its own.
        """
        groups = [self._folder, *(self._folder / str(rank) for rank in range(workers)), self._folder / FREE]
        try:
            self._make(groups)
            for rank in range(workers):
                self.set_share(rank, cores_each)
            yield
        finally:
            self._remove(groups)

    def _make(self, groups: Sequence[Path]) -> None:
        """Make groups without quotas; those of version 2 are threaded ones below the first."""
        if not self._is_first:
            (self.system.folder / "cgroup.subtree_control").write_text("+cpu")
        self._make_empty(groups)
        if not self._is_first:
            (self._folder / "cgroup.subtree_control").write_text("+cpu")
        for group in groups:
            of_worker = group not in (self._folder, self._folder / FREE)
            if self._is_first:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.shares").write_text("65536" if of_worker else "262144")
            else:
                (group / "cpu.weight").write_text("2500" if of_worker else "10000")
                (group / "cpu.max").write_text(f"max {PERIOD_US}")

    def _make_empty(self, groups: Sequence[Path]) -> None:
        for group in groups:
            group.mkdir()
            if not self._is_first and group != self._folder:
                (group / "cgroup.type").write_text("threaded")

    def _remove(self, groups: Sequence[Path]) -> None:
        """Kill the processes in groups, but this one, and remove them: nobody is left behind."""
        until_s = time.monotonic() + _END_S
        for group in groups:
            while time.monotonic() < until_s and (processes := _processes(group) - {os.getpid()}):
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.05)
        for group in reversed(groups):
            with contextlib.suppress(OSError):  # its processes cannot be ended, or it was never made
                group.rmdir()

    def quota_us(self, name: int | str) -> int | None:
        """Return what a group has of each :data:`PERIOD_US`; None: no quota."""
        quota = (self._folder / str(name) / self._quota_file).read_text().split()[0]
        return None if quota == self._no_quota else int(quota)

    def set_quota_us(self, name: int | str, quota_us: int | None) -> None:
        """Set what :meth:`quota_us` returns."""
        quota = self._no_quota if quota_us is None else str(quota_us)
        (self._folder / str(name) / self._quota_file).write_text(quota)

    def set_share(self, rank: int, cores: float) -> None:
        """Set what a worker may use of a core; BenchmarkError: that is less than Linux can keep to."""
        if PERIOD_US * cores < _LEAST_QUOTA_US:
            least = _LEAST_QUOTA_US / PERIOD_US
            raise BenchmarkError(f"{cores:.2g} of a core: the least share of a worker is {least:.2g}")
        self.set_quota_us(rank, None if cores == 1 else round(PERIOD_US * cores))

    @contextlib.contextmanager
    def lifted(self, rank: int) -> Iterator[None]:
        """Let a worker have no quota inside the block: what is not measured need not take long."""
        kept_us = self.quota_us(rank)
        self.set_quota_us(rank, None)
        try:
            yield
        finally:
            self.set_quota_us(rank, kept_us)

    def put(self, name: int | str, process: int) -> None:
        """Put all threads of a process into a group."""
        (self._folder / str(name) / "cgroup.procs").write_text(str(process))

    def _put_thread(self, rank: int, thread: int, core: int | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            (self._folder / str(rank) / self._threads_file).write_text(str(thread))
            if core is not None:
                os.sched_setaffinity(thread, {core})

    def enter(self, rank: int, free: set[int]) -> None:
        """Put this process into the group of ``rank``, its ``free`` threads into that without a quota."""
        core = sorted(os.sched_getaffinity(0))[rank] if self.quota_us(rank) is None else None
        self.put(FREE, os.getpid())
        for thread in threads() - free:
            self._put_thread(rank, thread, core)

    def enter_computing(self, processes: Sequence[int]) -> int:
        """Put the threads with which TensorFlow computes in other processes into groups, by rank.

        Those that communicate get no quota, as on a machine whose devices compute.  Return how many compute.
        """
        computing = []
        for rank, process in enumerate(processes):
            self.put(FREE, process)
            computing += [(rank, thread) for thread in threads(_COMPUTING, process)]
        for rank, thread in computing:
            self._put_thread(rank, thread)
        return len(computing)

    def run_first(self, threads: set[int]) -> None:
        """Let threads that communicate run as soon as a message is there, as where devices compute.

        Otherwise Linux lets what computes go on to the end of its turn, 3 to 4 ms, and a message of Horovod's
        waits for several threads, one after the other.
        """
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if self._is_first:
                    # In no group: a new one has no time for such threads, and Linux gives it some only when
                    # it has forgotten the groups of the run before.
                    (self.system.folder / "tasks").write_text(str(thread))
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


def _processes(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    except OSError:  # there is no such group, or it is a threaded one
        return set()


def why_not(with_link: bool = True) -> str:
    """Say why this machine cannot be confined, as many containers; return an empty text where it can.

    ``with_link``: for runs over a :func:`link`, in which threads that communicate run first.
    """
    if reason := groups.why_not("cpu"):
        return reason
    missing = [tool for tool in ("ip", "tc", "nsenter") if with_link and shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (packages iproute2 and util-linux)"
    shares = Shares(prefix := f"benchmarks_{os.getpid()}_try")
    needs = f"the right to make cpu groups in {shares.system.folder}, as few containers"
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(shares.made(0, 1.0))
            if with_link:
                needs = f"the right to run threads first ({_FIRST_NEEDS[shares.system.version]})"
                tried = stack.enter_context(subprocess.Popen(["sleep", str(_TRIED_S)]))
                stack.callback(tried.kill)
                shares.put(FREE, tried.pid)
                shares.run_first({tried.pid})
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


def threads(named: tuple[str, ...] = ("",), process: int | None = None) -> set[int]:
    """Return the threads of a process, by default this one, whose names begin so."""
    found = set()
    for thread in Path(f"/proc/{process or os.getpid()}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(named):
                found.add(int(thread.name))
    return found


def keep_memory() -> None:
    """Keep the pages of this process where they are: a machine short of memory would take back its code."""
    everything_once_touched = 1 | 2 | 4  # MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT
    ctypes.CDLL(None, use_errno=True).mlockall(everything_once_touched)
