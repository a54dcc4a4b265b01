"""Pipeline schedules against each other: worker processes with equal shares of this machine.

Every worker's computing threads get a CPU quota; its communication is left free.  In every run all schedules
take turns, step by step, beside the whole model on one worker (serial) and the same work divided without
dependencies (local, the floor that no schedule can beat here).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_ooo.bench.pipeline import overhead as pipeline_overhead
from tf_ooo.bench.pipeline import pytorch as pipeline_torch
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.peak_memory import file_of
from tf_ooo.bench.shared.workloads import WORKLOADS
from tf_ooo.hosts.addresses import free_port

BASELINE = "gpipe"
SCHEDULES = ("gpipe", "1f1b", "fast_forward", "modulo", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
# All workers together get so much of this machine: the rest is for what communicates, which on machines with
# GPUs takes nothing from those that compute.  With 0.9, messages slow the tasks down.
SHARE = 0.6


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its rows."""
    options = _parser().parse_args(arguments)
    # Whoever ends it early leaves no workers and no CPU groups behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.overhead:
        write(options.json, [_overhead(workload, options.quick) for workload in options.workload])
        return
    reason = confine.why_not(with_link=False)
    if reason:
        print(f"skipped: {reason}")
        return
    if options.quick:
        options.devices, options.microbatches, options.repetitions = [2], [4], 4
        options.schedules = "gpipe,1f1b,fast_forward,modulo"
    rows: list[dict[str, Any]] = []
    for workload in options.workload:
        for devices in options.devices:
            for microbatches in options.microbatches:
                found = _run(options, workload, devices, microbatches)
                rows += rows_of(found, workload, microbatches)
                if "torch" in found:
                    theirs = pipeline_torch.rows_of(found, workload, microbatches)
                    print(*map(pipeline_torch.text_of, theirs), sep="\n", flush=True)
                    rows += theirs
                write(options.json, rows)
    write(options.json, rows)


def write(path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    """Rows so far, where a file is asked for."""
    if path:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tf-ooo bench pipeline", description=__doc__)
    quick = "2 workers, 4 micro-batches, 4 schedules: under 5 minutes"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--pictures", help="folder for a Gantt chart of a measured step of each schedule")
    parser.add_argument("--workload", nargs="+", default=["feed_forward"], choices=WORKLOADS)
    parser.add_argument("--devices", type=int, nargs="+", default=[4], help="worker processes")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--cores", type=float, help="of each worker; default: 0.6 of an equal share")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument(
        "--torch",
        action="store_true",
        help="torch.distributed.pipelining in turns with ours, where torch is installed (feed_forward)",
    )
    parser.add_argument(
        "--overhead",
        action="store_true",
        help="instead: one stage and one micro-batch against stock fit, in one process",
    )
    return parser


def _overhead(workload: str, quick: bool) -> dict[str, Any]:
    """The row of a process of its own, printed as a line too."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "tf_ooo.bench.pipeline.overhead", "--workload", workload]
        command += ["--pairs", "20" if quick else "60", "--out", str(out)]
        done = subprocess.run(command, env=quiet(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        row: dict[str, Any] = json.loads(out.read_text())
    print(pipeline_overhead.text_of(row), flush=True)
    return row


def _run(options: argparse.Namespace, workload: str, devices: int, microbatches: int) -> dict[str, Any]:
    """What the driver of one run has found."""
    more = ["--workload", workload, "--microbatches", str(microbatches), "--schedules", options.schedules]
    more += ["--pictures", options.pictures or ""]
    if options.torch:
        reason = pipeline_torch.why_not(workload, devices)
        more += [] if reason else ["--torch"]
        print(reason, end="\n" if reason else "", flush=True)
    return run_driver("tf_ooo.bench.pipeline.driver", options, devices, more)


def run_driver(module: str, options: argparse.Namespace, devices: int, more: Sequence[str]) -> dict[str, Any]:
    """What a driver, a process that trains with worker processes, has found.

    Args:
        module: of the driver.
        options: with ``cores`` and ``repetitions``.
        devices: worker processes.
        more: arguments of this driver alone.
    """
    prefix = f"tf_ooo_bench_{os.getpid()}_"
    cores = options.cores or round(SHARE * (os.cpu_count() or 1) / devices, 2)
    cluster = ",".join(f"127.0.0.1:{free_port()}" for _ in range(devices))
    with (
        tempfile.TemporaryDirectory() as folder,
        confine.shares(prefix, devices, cores),
        workers(cluster, devices, folder) as processes,
    ):
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, "--cluster", cluster]
        command += ["--group", prefix, "--processes", ",".join(map(str, processes)), "--out", str(out)]
        command += ["--cores", str(cores), "--repetitions", str(options.repetitions)]
        command += ["--memory", folder, *more]
        done = subprocess.run(command, env=quiet(), capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found | {"cores": cores}


def quiet() -> dict[str, str]:
    """The environment of processes that compute with one thread and log nothing."""
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def workers(cluster: str, devices: int, folder: str) -> Iterator[list[int]]:
    """Worker processes, each with one thread within an op; yields their ids."""
    started = []
    try:
        for task in range(devices):
            command = [sys.executable, "-m", "tf_ooo.bench.shared.worker", "--cluster", cluster]
            command += ["--task", str(task), "--memory", str(file_of(folder, task))]
            started.append(
                subprocess.Popen(command, env=quiet(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        for task, process in enumerate(started):
            if process.stdout is None or b"is ready" not in process.stdout.readline():
                raise SystemExit(f"worker {task} did not start")
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def rows_of(found: dict[str, Any], workload: str, microbatches: int) -> list[dict[str, Any]]:
    """One row for each schedule, printed as a line too."""
    times, devices = found["times"], found["devices"]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    baseline_s = medians.get(BASELINE)
    rows = []
    for name, one in found["schedules"].items():
        baseline_bits = found["schedules"].get(BASELINE, one)["bits"]
        row = {
            "workload": workload,
            "mode": "pipeline",
            "schedule": name,
            "runs": one["schedule"],
            "baseline": BASELINE if baseline_s else None,
            "devices": devices,
            "microbatches": microbatches,
            "cores": found["cores"],
            "step_s": medians[name],
            "step_s_min": min(times[name]),
            "step_s_max": max(times[name]),
            "baseline_step_s": baseline_s,
            "speedup": baseline_s / medians[name] if baseline_s else None,
            "predicted_step_s": one["predicted_step_s"],
            "bound_s": medians.get("local"),
            "serial_s": medians["serial"],
            "efficiency": medians["serial"] / (devices * medians[name]),
            "bubble_fraction": one["bubble_fraction"],
            "bubble_fraction_by_device": one["bubble_fraction_by_device"],
            "planned_step_s": one["planned_step_s"],
            "predicted_bubble_fraction": one["predicted_bubble_fraction"],
            "peak_bytes": one["peak_bytes"],
            "measured_peak_bytes": one["measured_peak_bytes"],
            "link": found["link"],
            "tasks_seen": one["tasks_seen"],
            "task_seconds": one["tasks"],
            "bit_equal": one["bits"] == baseline_bits,
        }
        rows.append({key: value for key, value in row.items() if value is not None})
        print(text_of(rows[-1]), flush=True)
    return rows


def text_of(row: dict[str, Any]) -> str:
    """One line."""
    shape = f"{row['workload']} P={row['devices']} m={row['microbatches']}"
    speedup = f"  {row['speedup']:.2f}x {row['baseline']}" if "speedup" in row else ""
    return (
        f"{shape:28s} {row['schedule']:14s} {row['step_s'] * 1e3:6.0f} ms "
        f"({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f}), predicted "
        f"{row['predicted_step_s'] * 1e3:.0f}, local {row.get('bound_s', 0) * 1e3:.0f}{speedup}, efficiency "
        f"{row['efficiency']:.2f}, bubble {row['bubble_fraction']:.0%} (predicted "
        f"{row['predicted_bubble_fraction']:.0%}), peak {_megabytes(row['measured_peak_bytes'])} MB "
        f"(predicted {_megabytes(row['peak_bytes'])}), {'same bits' if row['bit_equal'] else 'OTHER BITS'}"
    )


def _megabytes(sizes: Sequence[float]) -> str:
    return "/".join(f"{size / 1e6:.0f}" for size in sizes)


if __name__ == "__main__":
    main()
