"""Processes of a benchmark: each calls a function with what it is given, and leaves what that returns."""

import contextlib
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from tf_ooo.hosts.devices import held_ports

_OUT, _TAIL = "BENCHMARKS_OUT", 3000
_START_S, _ANSWER_S, _END_S = 300.0, 900.0, 20.0


class BenchmarkError(Exception):
    """A process of a benchmark failed; the text is the end of what it printed."""


def command(function: str, *given: Any) -> list[str]:
    """Return what starts a process that calls ``module:function``."""
    return [sys.executable, "-m", "benchmarks.processes", function, pickle.dumps(given).hex()]


def quiet(threads: int | None = 1) -> dict[str, str]:
    """Return the environment of processes that log nothing and compute with so many threads; None: all."""
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | limit


def result_of(start: Sequence[str], environment: Mapping[str, str], timeout_s: float | None = None) -> Any:
    """Run a :func:`command` and return its function's result; BenchmarkError: it failed, or took longer."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        told = {**environment, _OUT: str(out)}
        try:
            done = subprocess.run(start, env=told, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"a process of the benchmark took more than {timeout_s:g} s") from error
        if done.returncode or not out.exists():
            raise BenchmarkError(f"a process failed:\n{done.stdout[-_TAIL:]}{done.stderr[-_TAIL:]}")
        return pickle.loads(out.read_bytes())


def last_of(log: Path) -> str:
    """Return the end of what a process printed."""
    return log.read_text(errors="replace")[-_TAIL:].strip()


@contextlib.contextmanager
def cluster_of(
    count: int, line: Callable[[str, int], list[str]], environment: Mapping[str, str], folder: str | Path
) -> Iterator[tuple[str, list[int]]]:
    """Start workers by a line for all addresses and a task; yield the addresses and the processes' ids."""
    with held_ports(count) as ports, contextlib.ExitStack() as stack:
        cluster, processes = ",".join(f"127.0.0.1:{port}" for port in ports), []
        logs = [Path(folder) / f"worker_{task}.log" for task in range(count)]
        for task, log in enumerate(logs):
            with log.open("wb") as said:
                start = line(cluster, task)
                process = subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=said)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process, log in zip(processes, logs, strict=True):
            if process.stdout is None or b"is ready" not in process.stdout.readline():
                raise BenchmarkError(f"a worker did not start:\n{last_of(log) or 'it said nothing'}")
        yield cluster, [process.pid for process in processes]


def worker_line(cluster: str, task: int, *options: str) -> list[str]:
    """Return what starts a worker of this package."""
    return [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--task", str(task), *options]


class Job:
    """Ranks that connect to an address and :func:`answer` what all of them are asked.

    Where they may be stopped, they are while they are not asked anything.
    """

    def __init__(
        self, starts: list[list[str]], environ: dict[str, str], address: Path, ranks: int, stops: bool = False
    ) -> None:
        self._log, self._count, self._stops = address.with_suffix(".log"), ranks, stops
        self.ranks: dict[int, tuple[Connection, int]] = {}  # by rank, with the process
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen()
        self._listener.settimeout(_START_S)
        with self._log.open("wb") as log:
            self.launchers = [subprocess.Popen(of, env=environ, stdout=log, stderr=log) for of in starts]

    def connect(self) -> None:
        """Wait until each rank has said who it is."""
        while len(self.ranks) < self._count:
            try:
                connection = Connection(self._listener.accept()[0].detach())
            except TimeoutError:
                said = last_of(self._log)
                raise BenchmarkError(f"not all ranks have started in {_START_S:g} s:\n{said}") from None
            rank, process = connection.recv()
            self.ranks[rank] = connection, process
        self.signal(signal.SIGSTOP)

    def ask(self, *message: str) -> Any:
        """Tell all ranks; return the first one's answer.  BenchmarkError: a rank does not answer."""
        self.signal(signal.SIGCONT)
        try:
            for connection, _ in self.ranks.values():
                connection.send(message)
            answers = {}
            for rank, (connection, _) in self.ranks.items():
                if not connection.poll(_ANSWER_S):
                    raise EOFError
                answers[rank] = connection.recv()
        except (EOFError, OSError) as error:
            printed = last_of(self._log)
            raise BenchmarkError(f"a rank failed with {' '.join(message)}:\n{printed}") from error
        self.signal(signal.SIGSTOP)
        return answers[0]

    def signal(self, number: int) -> None:
        """Stop the ranks (SIGSTOP), or let them go on."""
        for _, process in self.ranks.values() if self._stops else ():
            os.kill(process, number)

    def end(self) -> None:
        self._listener.close()
        for _, process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(_END_S)
            launcher.kill()
            launcher.wait()


def answer(address: str, rank: int, tasks: Mapping[str, Callable[..., Any]]) -> None:
    """Be a rank of a :class:`Job` until it ends; a message is the name of a task, and what this takes."""
    with Client(address, "AF_UNIX") as benchmark:
        benchmark.send((rank, os.getpid()))
        while True:
            task, *given = benchmark.recv()
            benchmark.send(tasks[task](*given))


def end_cleanly() -> None:
    """Leave no workers and no CPU groups behind when somebody ends the benchmark early."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(ending, lambda number, frame: sys.exit(128 + number))


if __name__ == "__main__":
    _out = os.environ.pop(_OUT, os.devnull)  # is none of processes that this one starts
    _result = pkgutil.resolve_name(sys.argv[1])(*pickle.loads(bytes.fromhex(sys.argv[2])))
    Path(_out).write_bytes(pickle.dumps(_result))
    os._exit(0)  # at once: a cluster or a server would keep it
