"""Starts the processes of a run: workers with their share of this machine, and a driver that uses them."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.processes import command, quiet, result_of
from tf_ooo.bench.shared.rows import Row, known, seconds_of
from tf_ooo.bench.shared.worker import file_of
from tf_ooo.hosts.addresses import held_ports

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# All workers together get so much of this machine: the rest is for what communicates, which on machines with
# GPUs takes nothing from those that compute.  With 0.9, messages slow the tasks down.
SHARE = 0.6
# Characters of what a worker said last, where it does not start.
_TAIL = 2000


@dataclass(frozen=True)
class Workers:
    """What a driver is told: workers' addresses and process ids, the prefix of their CPU groups and the cores
    of each, how many turns to measure, and the folder for what workers write."""

    cluster: str
    processes: list[int]
    group: str
    cores: float
    repetitions: int
    folder: str


class Measured(TypedDict):
    """Seconds of a step in each turn, by run; of runs that get a row, what else it says."""

    devices: int
    cores: float
    times: dict[str, list[float]]
    runs: dict[str, Row]


def row_of(measured: Measured, about: Row, name: str, baseline: str, serial: str = "serial") -> Row:
    """The row of one run, beside its baseline if that was measured, and the whole model on one device.

    It begins with what is known ``about`` it; ``name``, ``baseline`` and ``serial`` are runs.
    """
    times, devices = measured["times"], measured["devices"]
    serial_s = statistics.median(times[serial])
    row = {
        **about,
        "schedule": name,
        "baseline": baseline if baseline in times else None,
        "devices": devices,
        "cores": measured["cores"],
        **seconds_of(times[name], times.get(baseline)),
        "serial_s": serial_s,
        "efficiency": serial_s / (devices * statistics.median(times[name])),
    }
    return known(row | measured["runs"].get(name, {}))


def run_driver(
    module: str, asked: DataclassInstance, devices: int, cores: float | None, repetitions: int
) -> Any:
    """What a driver has measured: a :class:`Measured`, or more.

    Its module is told its :class:`Workers`, one for each of the ``devices``, and what is ``asked`` for.
    ``cores`` of each worker: None is an equal part of :data:`SHARE` of this machine, at most one: a worker
    computes with one thread.
    """
    group = f"tf_ooo_bench_{os.getpid()}_"
    cores = cores or min(1.0, round(SHARE * confine.own_cores() / devices, 2))
    with (
        held_ports(devices) as ports,
        tempfile.TemporaryDirectory() as folder,
        confine.shares(group, devices, cores),
        _started(cluster := ",".join(f"127.0.0.1:{port}" for port in ports), devices, folder) as processes,
    ):
        workers = Workers(cluster, processes, group, cores, repetitions, folder)
        return result_of(command(module, workers, asked), quiet())


def end_cleanly() -> None:
    """Whoever ends the benchmark early leaves no workers and no CPU groups behind."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(ending, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def _started(cluster: str, devices: int, folder: str) -> Iterator[list[int]]:
    """Worker processes, each with one thread within an op; yields their ids."""
    start = [sys.executable, "-m", "tf_ooo.bench.shared.worker", "--cluster", cluster]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for task in range(devices):
            line = [*start, "--task", str(task), "--memory", str(file_of(folder, task))]
            with _said_by(folder, task).open("wb") as said:
                started = subprocess.Popen(line, env=quiet(), stdout=subprocess.PIPE, stderr=said)
            processes.append(started)
        for task, process in enumerate(processes):
            if process.stdout is None or b"is ready" not in process.stdout.readline():
                last = _said_by(folder, task).read_text(errors="replace")[-_TAIL:].strip()
                raise click.ClickException(f"worker {task} did not start:\n{last or 'it said nothing'}")
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _said_by(folder: str, task: int) -> Path:
    """What a worker has said of itself: why it does not start."""
    return Path(folder) / f"worker_{task}.log"
