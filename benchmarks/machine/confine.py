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
_FIRST_NEEDS = {
    1: "CAP_SYS_NICE",
    # With that option such threads have time of their own, of which these groups have none.
    2: "CAP_SYS_NICE, and a Linux without CONFIG_RT_GROUP_SCHED",
}
# These are by version: the period and its file, the file of quotas, its word for none, the weights
# of FREE and of the others, and the file of threads.
_FILES = {
    1: (("cpu.cfs_period_us", PERIOD_US), "cpu.cfs_quota_us", "-1",
        ("cpu.shares", 262144), ("cpu.shares", 65536), "tasks"),
    2: (("cpu.max", f"max {PERIOD_US}"), "cpu.max", "max",
        ("cpu.weight", 10000), ("cpu.weight", 2500), "cgroup.threads"),
}  # fmt: skip


class Shares:
    """Groups of threads of a run, in a folder of this name: one for each worker, by rank, and :data:`FREE`.

    A process is put into one of them whole, and then single threads of it into others.  FREE has no quota and
    comes four times as often as the rest, and all come before others of this machine: what communicates must
    not wait for what computes.  OSError wherever the system refuses.
    """

    def __init__(self, prefix: str, system: groups.System | None = None) -> None:
        self.system = system or groups.system("cpu")
        self._folder = self.system.folder / prefix
        period, self._quota, self._none, free, other, self._threads = _FILES[self.system.version]
        self._free, self._other = dict([period, free]), dict([period, other])

    @contextlib.contextmanager
    def made(self, workers: int, cores_each: float) -> Iterator[None]:
        """Make the groups; all processes in them but this one end with the block.

        Where a group has used up its quota, what takes no time waits too, such as handing a tensor over.  So
        with ``cores_each`` 1 there is no quota: the threads of a worker stay on a core of its own.
        """
        with contextlib.ExitStack() as stack:
            folders = [stack.enter_context(self.system.made(self._folder.name, self._free))]
            for name in (*range(workers), FREE):
                files = self._free if name == FREE else self._other
                own = self.system.made(f"{self._folder.name}/{name}", files, threaded=True)
                folders.append(stack.enter_context(own))
            stack.callback(_end_processes, folders)
            for rank in range(workers):
                self.set_share(rank, cores_each)
            yield

    def set_share(self, rank: int, cores: float) -> None:
        """Set what a worker may use of a core; BenchmarkError: that is less than Linux can keep to."""
        if PERIOD_US * cores < _LEAST_QUOTA_US:
            least = _LEAST_QUOTA_US / PERIOD_US
            raise BenchmarkError(f"{cores:.2g} of a core: the least share of a worker is {least:.2g}")
        quota = self._none if cores == 1 else round(PERIOD_US * cores)
        self.system.write(self._folder / str(rank), {self._quota: quota})

    @contextlib.contextmanager
    def lifted(self, rank: int) -> Iterator[None]:
        """Let a worker have no quota inside the block: what is not measured need not take long."""
        quota = self._folder / str(rank) / self._quota
        kept = quota.read_text()
        quota.write_text(self._none)
        try:
            yield
        finally:
            quota.write_text(kept)

    def put(self, name: int | str, process: int) -> None:
        """Put all threads of a process into a group."""
        (self._folder / str(name) / "cgroup.procs").write_text(str(process))

    def _put_thread(self, rank: int, thread: int, core: int | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            (self._folder / str(rank) / self._threads).write_text(str(thread))
            if core is not None:
                os.sched_setaffinity(thread, {core})

    def enter(self, rank: int, free: set[int]) -> None:
        """Put this process into the group of ``rank``, its ``free`` threads into that without a quota."""
        whole = (self._folder / str(rank) / self._quota).read_text().startswith(self._none)
        core = sorted(os.sched_getaffinity(0))[rank] if whole else None
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
            computing += [(rank, thread) for thread in threads(("tf_Compute",), process)]
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
                if self.system.version == 1:
                    # In no group: a new one has no time for such threads, and Linux gives it some only when
                    # it has forgotten the groups of the run before.
                    (self.system.folder / "tasks").write_text(str(thread))
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


def _end_processes(folders: Sequence[Path]) -> None:
    """Kill all processes in groups, but this one: nobody is left behind."""
    until_s, own = time.monotonic() + _END_S, {os.getpid()}
    for procs in (folder / "cgroup.procs" for folder in folders):
        with contextlib.suppress(OSError):  # it is a threaded group, whose processes are in the one above
            while (left := {*map(int, procs.read_text().split())} - own) and time.monotonic() < until_s:
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                time.sleep(0.05)


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
                tried = stack.enter_context(subprocess.Popen(["sleep", "9"]))
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
    ids = set()
    for thread in Path(f"/proc/{process or os.getpid()}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().startswith(named):
                ids.add(int(thread.name))
    return ids


def keep_memory() -> None:
    """Keep the pages of this process where they are: a machine short of memory would take back its code."""
    everything_once_touched = 1 | 2 | 4  # MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT
    ctypes.CDLL(None, use_errno=True).mlockall(everything_once_touched)
