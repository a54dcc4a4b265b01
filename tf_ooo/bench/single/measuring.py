"""Measures one case of ``tf-ooo bench single``: processes side by side, whose ways take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import click

from tf_ooo.bench.shared.processes import LineProcess, command
from tf_ooo.bench.shared.rows import Row, known, seconds_of
from tf_ooo.bench.single.cases import FITS, STOCK, AskedWays, Case, Ready

TENSORFLOW, PYTORCH = "tf_ooo.bench.single.worker", "tf_ooo.bench.single.pytorch"
CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_gpu_graph_min_graph_size=1"
# (prefix of the names, XLA's flags, ways to run under them, priority of the main stream), a process each.
FLAGGED: tuple[tuple[str, str, list[str], int | None], ...] = (
    ("command buffers, ", CONCURRENT, [STOCK, "early"], None),
    ("no CUDA graphs, ", "--xla_gpu_enable_command_buffer=", [STOCK, "early"], None),
    ("main stream urgent, ", "", ["early"], -5),
)


class Worker:
    """A process that has made its steps; where it ended instead, it has none, and ``said`` has the reason.

    ``names``: of the ways in rows, and in the process.  Else as in :class:`tf_ooo.bench.single.cases.Ready`.
    """

    def __init__(self, process: LineProcess, prefix: str = "") -> None:
        self._process = process
        try:
            ready: Ready = process.answered()
        except RuntimeError as error:
            ready = {"ready": [], "said": {"": str(error)}}
        self.names = {prefix + name: name for name in ready["ready"]}
        self.said = {prefix + name: text for name, text in ready["said"].items()}
        self.modules = {prefix + name: module for name, module in ready.get("modules", {}).items()}
        self.device, self.versions = ready.get("device", "unknown"), ready.get("versions", {})

    def run(self, name: str, steps: int) -> dict[str, float]:
        """What the process answers; RuntimeError where it has ended, which loses all of its steps."""
        try:
            self._process.tell(f"{self.names[name]} {steps}")
            turn: dict[str, float] = self._process.answered()
        except (RuntimeError, BrokenPipeError) as error:
            for lost in self.names:
                during = "" if lost == name else f" with {name}"
                self.said[lost] = f"{self.said.get(lost) or ''}; stopped{during}: {error}".lstrip("; ")
            self.names = {}
            raise RuntimeError(str(error)) from error
        return turn


def started(module: str, case: Case, ways: AskedWays, flags: str = "") -> LineProcess:
    """A process that begins to make steps; ``flags`` are XLA's, added to those of this process."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return LineProcess(command(module, case, ways), environment)


@contextmanager
def workers(case: Case, names: Sequence[str], more: bool) -> Iterator[list[Worker]]:
    """All processes of a case, once all have made their steps; ``more``: those of :data:`FLAGGED` too."""
    fits = [name for name in names if name in FITS]
    asked = [("", TENSORFLOW, AskedWays([name for name in names if name not in FITS]), "")]
    asked += [("", TENSORFLOW, AskedWays(fits), "")] if fits else []
    for prefix, flags, ways, priority in FLAGGED if more else ():
        asked.append((prefix, TENSORFLOW, AskedWays(ways, priority), flags))
    asked.append(("", PYTORCH, AskedWays([]), ""))
    with ExitStack() as stack:
        processes = []
        for prefix, module, of_process, flags in asked:
            processes.append((started(module, case, of_process, flags), prefix))
            stack.callback(processes[-1][0].close)
        yield [Worker(process, prefix) for process, prefix in processes]


def measure(case: Case, names: Sequence[str], rounds: int, steps: int, more: bool) -> Iterator[list[Row]]:
    """After each round one row for each way of training that runs; the others are printed with their reasons.

    A way whose process ends keeps what was measured until then, and its note says so.
    """
    with workers(case, names, more) as processes:
        turns: dict[str, list[dict[str, float]]] = {name: [] for worker in processes for name in worker.names}
        for worker in processes:
            for name in worker.said.keys() - turns.keys():
                click.echo(f"{case.name}  {name}: not run: {worker.said[name]}")
        about = known({"date": time.strftime("%Y-%m-%d %H:%M"), "driver": driver(), **processes[0].versions})
        for _ in range(rounds):
            for worker in processes:
                _take_turns(case, worker, steps, turns)
            yield [row | about for row in rows_of(case, processes, turns)]


def _take_turns(case: Case, worker: Worker, steps: int, turns: dict[str, list[dict[str, float]]]) -> None:
    """One turn of each way of a process."""
    for name in list(worker.names):
        try:
            turns[name].append(worker.run(name, steps))
        except RuntimeError as error:
            click.echo(f"{case.name}  {name}: stopped: {error}")
            return


def rows_of(
    case: Case, processes: Sequence[Worker], turns: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[Row]:
    """One row for each way that has taken a turn, beside stock XLA."""
    of_ways = {name: worker for worker in processes for name in worker.said}
    seconds = {name: [turn["step_s"] for turn in taken] for name, taken in turns.items() if taken}
    rows = []
    for name, seconds_of_way in seconds.items():
        worker = of_ways[name]
        module = worker.modules.get(name, {})
        row = {
            "workload": case.name,
            "mode": "single_device",
            "schedule": name,
            "baseline": STOCK,
            "device": processes[0].device,
            **seconds_of(seconds_of_way, seconds.get(STOCK)),
            "peak_bytes": max(int(turn.get("peak_bytes", 0)) for turn in turns[name]) or None,
            "note": worker.said[name] or None,
            "predicted_peak_bytes": module.get("total_bytes"),
            "data": case.data,
            **{key: module.get(key) for key in ("launches", "in_graphs", "on_side_streams")},
        }
        rows.append(known(row))
    return rows


def text_of(row: Row) -> str:
    """One line."""
    low, high = row["step_s_min"] * 1e3, row["step_s_max"] * 1e3
    peak = f"  {row['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in row else ""
    return (
        f"{row['workload']:32s} {row['schedule']:36s} {row['step_s'] * 1e3:8.2f} ms ({low:.2f}-{high:.2f})  "
        f"{row.get('speedup', 0):.2f}x{peak}  device: {row['device']}"
    )


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
