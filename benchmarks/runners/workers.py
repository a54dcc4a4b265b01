"""Worker processes, each with a share of this machine's CPU, and a process that trains over them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import Case, Measured
from benchmarks.machine import confine
from benchmarks.processes import BenchmarkError, command, measured_from, quiet, result_of
from tf_ooo.hosts.addresses import held_ports

# All workers together get so much of this machine: the rest is for what communicates, which on machines with
# GPUs takes nothing from those that compute.  With 0.9, messages slow the tasks down.
_SHARE = 0.6
_TAIL = 2000


@dataclass(frozen=True)
class Workers:
    """The process that trains is told this.

    Attributes:
        cluster: addresses of the workers, with commas; ``processes``: their ids.
        group: prefix of the CPU groups; ``cores``: what each worker has of a core.
        folder: for files of this run.
    """

    cluster: str
    processes: list[int]
    group: str
    cores: float
    folder: str


def why_not(case: Case) -> str:
    """Say what this machine lacks for shares of its CPU."""
    return confine.why_not(with_link=False)


def run(case: Case) -> Measured:
    """Run a case on ``devices`` workers; all ways are steps of one process, in turns."""
    devices = case.parameters["devices"]
    cores = min(1.0, round(_SHARE * confine.own_cores() / devices, 2))
    group = f"benchmarks_{os.getpid()}_"
    with (
        held_ports(devices) as ports,
        tempfile.TemporaryDirectory() as folder,
        confine.shares(group, devices, cores),
        _started(cluster := ",".join(f"127.0.0.1:{port}" for port in ports), devices, folder) as processes,
    ):
        workers = Workers(cluster, processes, group, cores, folder)
        return measured_from(result_of(command("benchmarks.runners.training", workers, case), quiet()))


@contextlib.contextmanager
def _started(cluster: str, devices: int, folder: str) -> Iterator[list[int]]:
    """Start workers with one thread within an op, and four ops side by side; yield their ids."""
    start = [sys.executable, "-m", "tf_ooo", "worker", "--cluster", cluster, "--inter-op-threads", "4"]
    processes: list[subprocess.Popen[bytes]] = []
    logs = [Path(folder) / f"worker_{task}.log" for task in range(devices)]
    try:
        for task, log in enumerate(logs):
            line = [*start, "--intra-op-threads", "1", "--task", str(task)]
            with log.open("wb") as said:
                processes.append(subprocess.Popen(line, env=quiet(), stdout=subprocess.PIPE, stderr=said))
        for process, log in zip(processes, logs, strict=True):
            if process.stdout is None or b"is ready" not in process.stdout.readline():
                last = log.read_text(errors="replace")[-_TAIL:].strip()
                raise BenchmarkError(f"a worker did not start:\n{last or 'it said nothing'}")
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
