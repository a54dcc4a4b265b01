"""Runs ``tf-ooo run``: a training script with its workers or ranks, started again where a process is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf_ooo.errors import OptionsError
from tf_ooo.hosts.devices import CLUSTER_VARIABLE, held_ports, parse

# A script has so long to end by itself when a worker of it has ended, or it was told to; then it is killed.
_PATIENCE_S = 60.0
_GRACE_S = 5.0


@dataclass(frozen=True)
class Job:
    """Describes a script and its processes.

    Attributes:
        script: its path and arguments.
        ranks: how many processes ``horovodrun`` starts; 0: one process without it.
        workers: the number of tasks of a cluster on this machine, including the script's own; 0: none.
        cluster: addresses of workers that somebody else starts; empty: none.
    """

    script: Sequence[str]
    ranks: int = 0
    workers: int = 0
    cluster: str = ""

    def __post_init__(self) -> None:
        chosen = [f"--{name}" for name in ("ranks", "workers", "cluster") if getattr(self, name)]
        if len(chosen) > 1:
            raise OptionsError(f"{' and '.join(chosen)} do not go together; give one")
        if self.cluster:
            parse(self.cluster)

    def command(self) -> list[str]:
        """Return the command that starts the script."""
        python = [sys.executable, *self.script]
        return ["horovodrun", "-np", str(self.ranks), *python] if self.ranks else python

    @contextlib.contextmanager
    def addresses(self) -> Iterator[str]:
        """Yield the addresses of all tasks, with ports kept within the block; empty without workers."""
        if not self.workers:
            yield self.cluster
            return
        with held_ports(self.workers) as ports:
            yield ",".join(f"127.0.0.1:{port}" for port in ports)


def _check_script(script: Sequence[str]) -> None:
    """Raise OptionsError for a script that Python cannot run, however often it is restarted."""
    name = script[0]
    if name.startswith("--"):
        raise OptionsError(f"{name} is no option of tf-ooo run, and no script; see tf-ooo run --help")
    if not name.startswith("-") and not (Path(name).is_file() or Path(name, "__main__.py").is_file()):
        raise OptionsError(f"SCRIPT {name!r} is not there; expected a Python file, or -m and a module")


@dataclass
class _Attempt:
    """Represents one start of all processes, each the first of its own process group."""

    script: subprocess.Popen[bytes]
    workers: dict[str, subprocess.Popen[bytes]]

    def lost(self) -> list[str]:
        """Return workers that have ended, in words."""
        return [
            f"{name} ended with {p.returncode}" for name, p in self.workers.items() if p.poll() is not None
        ]

    def wait(self, told: Sequence[str]) -> int | None:
        """Return the script's exit status, or None after a signal; after a lost worker wait a minute."""
        deadline_s = float("inf")
        while self.script.poll() is None:
            if told:
                return None
            if self.lost():
                deadline_s = min(deadline_s, time.monotonic() + _PATIENCE_S)
            if time.monotonic() > deadline_s:
                _end(self.script)
            time.sleep(0.1)
        return self.script.returncode


def supervise(job: Job, max_restarts: int, say: Callable[[str], None]) -> int:
    """Run the job until its script succeeds; return its last exit status.

    A script that fails is started again, with new workers, up to ``max_restarts`` times: it has to go on from
    its last checkpoint by itself (``keras.callbacks.BackupAndRestore``).  Ctrl-C and SIGTERM end the job.
    """
    _check_script(job.script)
    with _signals() as told:
        for left in range(max_restarts, -1, -1):
            with _started(job) as attempt:
                status = attempt.wait(told)
                lost = attempt.lost()
            if status is None:
                say(f"ended by {told[0]}")
                return 128 + signal.Signals[told[0]].value
            exit_status = status if status >= 0 else 128 - status
            if status == 0 or left == 0:
                break
            why = "; ".join([f"the script ended with {status}", *lost])
            say(f"{why}: starting again ({left} restart{'s' if left > 1 else ''} left)")
    return exit_status


@contextlib.contextmanager
def _started(job: Job) -> Iterator[_Attempt]:
    """Start all processes of the job; none is left at the end."""
    with job.addresses() as addresses, contextlib.ExitStack() as ends:

        def start(command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
            try:
                process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
            except FileNotFoundError as error:
                raise OptionsError(f"{command[0]} is not installed: {error}") from error
            ends.callback(_end, process)
            return process

        workers: dict[str, subprocess.Popen[bytes]] = {}
        for task in range(1, job.workers):
            command = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", addresses, "--task", str(task)]
            workers[f"worker {addresses.split(',')[task]}"] = start(command)
        yield _Attempt(start(job.command(), **({CLUSTER_VARIABLE: addresses} if addresses else {})), workers)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, then kill all of its group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """Yield a list that gets the names of signals: Ctrl-C and SIGTERM.

    Signals raise nothing: otherwise a process that is just being started would be lost.
    """
    told: list[str] = []
    before = {
        number: signal.signal(number, lambda number, frame: told.append(signal.Signals(number).name))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
