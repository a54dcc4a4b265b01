"""Data parallel training beside stock Horovod: two ranks with a share of the CPU each, behind one link.

Horovod's settings are a process's.  So each setting that is tried has a job of its own, as has TensorFlow's
strategy; all jobs run side by side on the same link, in the same CPU groups, and take turns with each other.
Horovod's background threads exchange messages also when nothing is to be averaged: the processes of a
Horovod job are stopped (SIGSTOP) while it is not its turn.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.case import Case, Measured, Way, WayRun
from benchmarks.machine import confine
from benchmarks.models import Weights, compared
from benchmarks.processes import BenchmarkError, command, last_of, quiet
from benchmarks.turns import take_turns
from tf_ooo.hosts.addresses import held_ports

_LAUNCHER = Path(sys.executable).with_name("horovodrun")
_WORKERS = 2
_START_S, _ANSWER_S, _END_S = 180.0, 900.0, 20.0
_LOCAL_TURNS = 3
# A message may wait for a rank that is stopped; Horovod's own limit is 30 s.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "36000", "HOROVOD_STALL_CHECK_DISABLE": "1"}


# Kinds of ways: where gradients are averaged, and by whom.
APPLY, TAPE, STRATEGY, CALLBACK, LOCAL = "apply", "tape", "strategy", "callback", "local"


class End(NamedTuple):
    """A way has come to this."""

    weights: Weights  # of the first rank
    predicted_s: float | None = None
    about: dict[str, Any] = {}


def why_not(case: Case) -> str:
    """Say why this machine cannot run the case; return an empty text where it can."""
    cores = _WORKERS * float(case.parameters["cores"])
    if cores > confine.own_cores():
        return f"needs {cores:g} cores, and there are {confine.own_cores()}"
    if not _LAUNCHER.exists():
        return f"there is no {_LAUNCHER.name} beside Python: make horovod"
    return confine.why_not()


def run(case: Case) -> Measured:
    """Run all ways in turns."""
    asked, group = case.parameters, f"tf_ooo_benchmarks_{os.getpid()}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        inside = stack.enter_context(confine.link(group))
        stack.enter_context(confine.Shares(group).made(_WORKERS, asked["cores"]))
        jobs = stack.enter_context(_jobs(case, group, inside, folder))
        job_of = {way.name: job for job in jobs for way in job.ways}
        local = next(way.name for way in case.ways if way.options["kind"] == LOCAL)
        facts = job_of[local].ask("make", local)
        compute_s = statistics.median(job_of[local].ask("turn", local) for _ in range(_LOCAL_TURNS))
        mbit = None  # the link is as fast as the machine
        if "communication" in asked:
            mbit = bandwidth_mbit(asked["communication"], facts["gradient_bytes"], compute_s)
            confine.slow(inside, mbit * 1e6)
        for name, job in job_of.items():
            if name != local:
                job.ask("make", name)
        steps = {name: functools.partial(job.ask, "turn", name) for name, job in job_of.items()}
        turns_s = take_turns({way.name: steps[way.name] for way in case.ways}, case.turns)
        about = {**facts, "compute_s": compute_s, "link_mbit_s": mbit, "ranks": _WORKERS}
        ends = {name: job.ask("end", name) for name, job in job_of.items()}
    return measured(case, turns_s, ends, about)


def jobs_of(case: Case) -> dict[str, list[Way]]:
    """Return group ways by what is a process's: Horovod's settings, as JSON; or TensorFlow's strategy."""
    jobs: dict[str, list[Way]] = {}
    for way in case.ways:
        knobs = json.dumps(way.options.get("knobs", {}))
        jobs.setdefault(STRATEGY if way.options["kind"] == STRATEGY else knobs, []).append(way)
    return jobs


def measured(
    case: Case, turns_s: Mapping[str, list[float]], ends: Mapping[str, End], about: dict[str, Any]
) -> Measured:
    """Compare the weights of all ways with those of the first, stock Horovod; one rank's are alone."""
    runs = {name: WayRun(turns_s[name], end.predicted_s, about=end.about) for name, end in ends.items()}
    stock, *others = case.ways
    trained = {way.name: ends[way.name].weights for way in others if way.options["kind"] != LOCAL}
    bits, runs = compared(runs, trained, ends[stock.name].weights)
    about = about | {"bits compared with": "stock Horovod, two ranks"}
    return Measured(runs, bits, float(case.parameters["cores"]), about)


def bandwidth_mbit(communication: float, gradient_bytes: int, compute_s: float) -> float:
    """Return the link on which all gradients take so many times as long as computing.

    A ring of n ranks sends them 2 (n - 1) times (Patarasuk & Yuan 2009), over one link here.
    """
    return round(8 * 2 * (_WORKERS - 1) * gradient_bytes / (communication * compute_s) / 1e6, 1)


class Job:
    """The ranks of one setting; where they may be stopped, they are while they are not asked anything."""

    def __init__(self, ways: Sequence[Way], log: Path, stops: bool) -> None:
        self.ways, self._log, self._stops = ways, log, stops
        self.ranks: dict[int, tuple[Connection, int]] = {}  # by rank, with the process

    def start(self, start: Sequence[str], environment: Mapping[str, str]) -> None:
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(start, env=environment, stdout=log, stderr=log)

    def ask(self, *message: str) -> Any:
        """Tell all ranks; return the first one's answer.  BenchmarkError: a rank does not answer."""
        self.signal(signal.SIGCONT)
        try:
            for connection, _ in self.ranks.values():
                connection.send(message)
            answers = {rank: self._answer(connection) for rank, (connection, _) in self.ranks.items()}
        except (EOFError, OSError) as error:
            printed = last_of(self._log)
            raise BenchmarkError(f"a rank failed with {' '.join(message)}:\n{printed}") from error
        self.signal(signal.SIGSTOP)
        return answers[0]

    def end(self) -> None:
        for _, process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_END_S)
        self._launcher.kill()
        self._launcher.wait()

    def signal(self, number: int) -> None:
        """Stop the ranks (SIGSTOP), or let them go on."""
        for _, process in self.ranks.values() if self._stops else ():
            os.kill(process, number)

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(_ANSWER_S):
            raise EOFError
        return connection.recv()


@contextlib.contextmanager
def _jobs(case: Case, group: str, inside: Sequence[str], folder: Path) -> Iterator[list[Job]]:
    """Start all jobs, and wait until each rank has said who it is; they end with the block."""
    own = {name: value for name, value in quiet().items() if not name.startswith("HOROVOD_")}
    own["PATH"] = f"{_LAUNCHER.parent}{os.pathsep}{own.get('PATH', '')}"
    launch = [*inside, str(_LAUNCHER), "--gloo", "--network-interfaces", "lo", "-np", str(_WORKERS)]
    jobs: list[Job] = []
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        listener.settimeout(_START_S)
        cluster = [f"127.0.0.1:{port}" for port in stack.enter_context(held_ports(_WORKERS))]
        for number, (knobs, ways) in enumerate(jobs_of(case).items()):
            told = case, ways, group, str(folder / "socket"), number, cluster
            start = [*launch, *command("benchmarks.runners.horovod_rank:main", *told)]
            jobs.append(job := Job(ways, folder / f"log_{number}.txt", knobs != STRATEGY))
            job.start(start, own | _PATIENT | (json.loads(knobs) if knobs != STRATEGY else {}))
            stack.callback(job.end)
        for _ in range(_WORKERS * len(jobs)):
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                logs = "\n".join(map(last_of, folder.glob("log_*")))
                raise BenchmarkError(f"not all ranks have started in {_START_S:g} s:\n{logs}") from None
            connection = Connection(accepted.detach())
            number, index, process = connection.recv()
            jobs[number].ranks[index] = connection, process
        for job in jobs:
            job.signal(signal.SIGSTOP)
        yield jobs
