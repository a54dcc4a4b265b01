"""Measures one case of ``tf-ooo bench single``: all ways in turns."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from tf_ooo.bench.shared.rows import Row, known
from tf_ooo.bench.single.cases import Case
from tf_ooo.bench.single.processes import Worker, workers
from tf_ooo.bench.single.rows import rows_of


@dataclass(frozen=True)
class Taken:
    """What was measured until now, by way: seconds of a step in each turn, and the peak of all turns."""

    seconds: dict[str, list[float]]
    peak_bytes: dict[str, int]


def measure(case: Case, names: Sequence[str], rounds: int, steps: int, more: bool) -> Iterator[list[Row]]:
    """After each round one row for each way of training that runs; the others are printed with their reasons.

    A way whose process ends keeps what was measured until then, and its note says so.
    """
    with workers(case, names, more) as processes:
        taken = Taken({name: [] for worker in processes for name in worker.names}, {})
        for worker in processes:
            for name in worker.said.keys() - taken.seconds.keys():
                click.echo(f"{case.name}  {name}: not run: {worker.said[name]}")
        about = {"date": time.strftime("%Y-%m-%d %H:%M"), "driver": driver(), **processes[0].versions}
        for _ in range(rounds):
            for worker in processes:
                _take_turns(case, worker, steps, taken)
            yield [known(row | about) for row in _rows(case, processes, taken)]


def _take_turns(case: Case, worker: Worker, steps: int, taken: Taken) -> None:
    """One turn of each way of a process."""
    for name in list(worker.names):
        try:
            turn = worker.run(name, steps)
        except RuntimeError as error:
            click.echo(f"{case.name}  {name}: stopped: {error}")
            return
        taken.seconds[name].append(turn["step_s"])
        taken.peak_bytes[name] = max(taken.peak_bytes.get(name, 0), int(turn.get("peak_bytes", 0)))


def _rows(case: Case, processes: Sequence[Worker], taken: Taken) -> list[Row]:
    said = {name: text for worker in processes for name, text in worker.said.items()}
    modules = {name: module for worker in processes for name, module in worker.modules.items()}
    timed = {name: seconds for name, seconds in taken.seconds.items() if seconds}
    rows = rows_of(case.name, processes[0].device, timed, taken.peak_bytes, said)
    for row in rows:
        module = modules.get(row["schedule"], {})
        row |= {"predicted_peak_bytes": module.get("total_bytes"), "data": case.data}
        row |= {key: module.get(key) for key in ("launches", "in_graphs", "on_side_streams")}
    return rows


def driver() -> str | None:
    """The version of the GPU's driver; None where there is none."""
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def has_gpu() -> bool:
    """Whether TensorFlow sees one; asked in a process of its own, so that this one holds no memory."""
    code = "import tensorflow as tf; print('GPUS', len(tf.config.list_physical_devices('GPU')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return "GPUS 0" not in done.stdout and "GPUS" in done.stdout
