"""One GPU: dW on side streams inside XLA, against what else trains the model: ``tf-ooo bench single``.

Stock Keras (XLA), XLA with concurrent command buffers, TensorFlow without XLA and, where it is installed,
PyTorch with torch.compile and CUDA graphs.  All take turns, a few steps at a time.  Without a GPU small
networks run as a check of the machinery, and the rows say ``device: cpu``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tf_ooo.bench.single.fit import FITS
from tf_ooo.bench.single.inputs import KINDS
from tf_ooo.bench.single.networks import BATCHES, NETWORKS, SMALL
from tf_ooo.bench.single.worker import BASE, OURS

CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT --xla_gpu_graph_min_graph_size=1"
BASELINE = "xla"


class Worker:
    """A process that runs steps when told to."""

    def __init__(self, module: str, request: dict[str, Any], prefix: str = "", flags: str = "") -> None:
        self._prefix = prefix
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        environment = os.environ | {
            "XLA_FLAGS": flags, "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "3",
        }  # fmt: skip
        command = [sys.executable, "-m", f"tf_ooo.bench.single.{module}", json.dumps(request)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.device = "unknown"
        self.names: dict[str, str] = {}
        self.said: dict[str, str] = {}
        self.modules: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, str] = {}

    def wait(self) -> None:
        """Until its steps are made."""
        prefix = self._prefix
        try:
            first = self._read()
        except RuntimeError as error:
            first = {"ready": [], "said": {"": str(error)}, "device": "unknown"}
        self.device = first["device"]
        self.names = {prefix + name: name for name in first["ready"]}
        self.said = {prefix + name: text for name, text in first["said"].items()}
        self.modules = {prefix + name: found for name, found in first.get("modules", {}).items()}
        self.versions = first.get("versions", {})

    def run(self, name: str, steps: int) -> dict[str, Any]:
        """What the worker answers; RuntimeError where it has ended, which loses all of its steps."""
        assert self._process.stdin is not None  # for mypy: a pipe was asked for
        try:
            self._process.stdin.write(f"{self.names[name]} {steps}\n")
            self._process.stdin.flush()
            return self._read()
        except (RuntimeError, BrokenPipeError) as error:
            for other in self.names:
                said = "" if other == name else f" with {name}"
                self.said[other] = f"{self.said.get(other) or ''}; stopped{said}: {error}".lstrip("; ")
            self.names = {}
            raise RuntimeError(str(error)) from error

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # for mypy: a pipe was asked for
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return found
        raise RuntimeError(f"the process ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what a process that has ended was told last
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Case:
    """What is measured side by side: one network, batch and kind of data, all ways."""

    network: str
    batch: int
    data: str = "random"
    size: int | None = None
    make_s: float | None = None

    @property
    def name(self) -> str:
        """For rows and pictures."""
        size = f" {self.size}x{self.size}" if self.size else ""
        return f"{self.network}{size} batch {self.batch}" + ("" if self.data == "random" else f" {self.data}")


# (prefix, XLA's flags, ours to run under them, priority of the main stream), a process each.
FLAGGED = (
    ("command buffers, ", CONCURRENT, ("xla", "early"), None),
    ("no CUDA graphs, ", "--xla_gpu_enable_command_buffer=", ("xla", "early"), None),
    ("main stream urgent, ", "", ("early",), -5),
)


@contextmanager
def _workers(case: Case, names: Sequence[str], more: bool) -> Iterator[list[Worker]]:
    request = asdict(case)
    with ExitStack() as stack:
        found = []

        def start(*arguments: Any) -> None:
            found.append(Worker(*arguments))
            stack.callback(found[-1].close)

        fits = [name for name in names if name in FITS]
        start("worker", {**request, "steps": [name for name in names if name not in FITS]})
        if fits:
            start("worker", {**request, "steps": fits})
        for prefix, flags, steps, priority in FLAGGED if more else ():
            start("worker", {**request, "steps": list(steps), "priority": priority}, prefix, flags)
        start("pytorch", request)
        for worker in found:  # they make their steps side by side
            worker.wait()
        yield found


def measure(
    case: Case, names: Sequence[str], rounds: int, steps: int, more: bool
) -> Iterator[list[dict[str, Any]]]:
    """After each round one row for each way of training that runs; the others are printed with their reasons.

    A way whose process ends keeps what was measured until then, and its note says so.
    """
    with _workers(case, names, more) as workers:
        taken: dict[str, list[float]] = {name: [] for worker in workers for name in worker.names}
        peaks: dict[str, int] = {}
        for worker in workers:
            for name in worker.said.keys() - taken.keys():
                print(f"{case.name}  {name}: not run: {worker.said[name]}", flush=True)
        about = {"date": time.strftime("%Y-%m-%d %H:%M"), "driver": driver(), **workers[0].versions}
        for _ in range(rounds):
            for worker in workers:
                for name in list(worker.names):
                    try:
                        found = worker.run(name, steps)
                    except RuntimeError as error:
                        print(f"{case.name}  {name}: stopped: {error}", flush=True)
                        break
                    taken[name].append(found["step_s"])
                    peaks[name] = max(peaks.get(name, 0), found.get("peak_bytes", 0))
            yield _rows(case, workers, taken, peaks, about)


def _rows(
    case: Case,
    workers: Sequence[Worker],
    taken: dict[str, list[float]],
    peaks: dict[str, int],
    about: dict[str, Any],
) -> list[dict[str, Any]]:
    said = {name: text for worker in workers for name, text in worker.said.items()}
    modules = {name: found for worker in workers for name, found in worker.modules.items()}
    timed = {name: seconds for name, seconds in taken.items() if seconds}
    rows = rows_of(case.name, workers[0].device, timed, peaks, said)
    for row in rows:
        found = modules.get(row["schedule"], {})
        row |= {"predicted_peak_bytes": found.get("total_bytes"), "data": case.data, **about}
        row |= {key: found.get(key) for key in ("launches", "in_graphs", "on_side_streams")}
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def driver() -> str | None:
    """The version of the GPU's driver; None where there is none."""
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def rows_of(
    workload: str,
    device: str,
    taken: dict[str, list[float]],
    peaks: dict[str, int],
    said: dict[str, str],
) -> list[dict[str, Any]]:
    """Medians beside those of stock XLA."""
    stock_s = statistics.median(taken[BASELINE]) if BASELINE in taken else None
    rows = []
    for name, seconds in taken.items():
        step_s = statistics.median(seconds)
        row = {
            "workload": workload,
            "mode": "single_device",
            "schedule": name,
            "baseline": BASELINE,
            "device": device,
            "step_s": step_s,
            "step_s_min": min(seconds),
            "step_s_max": max(seconds),
            "baseline_step_s": stock_s,
            "speedup": None if stock_s is None else stock_s / step_s,
            "peak_bytes": peaks.get(name) or None,
            "note": said.get(name) or None,
        }
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def text_of(row: dict[str, Any]) -> str:
    """One line."""
    low, high = row["step_s_min"] * 1e3, row["step_s_max"] * 1e3
    peak = f"  {row['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in row else ""
    return (
        f"{row['workload']:32s} {row['schedule']:36s} {row['step_s'] * 1e3:8.2f} ms ({low:.2f}-{high:.2f})  "
        f"{row.get('speedup', 0):.2f}x{peak}  device: {row['device']}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its rows."""
    options = _parser().parse_args(arguments)
    gpu = has_gpu()
    if not gpu:
        print("no GPU: small networks, to check the machinery; the times say nothing about streams")
    small = options.quick or not gpu
    networks = options.networks or (list(SMALL) if small else [n for n in NETWORKS if n not in SMALL])
    batches = options.batches or ([8] if small else BATCHES)
    every = list(BASE) if options.quick else [*BASE, *(n for n in OURS if n not in BASE)]
    names = options.ways or every
    cases = [
        Case(network, batch, data, options.size, options.make_s)
        for network in networks
        for batch in batches
        for data in options.data
    ]
    rows: list[dict[str, Any]] = []
    more = not options.ways and (not small or options.all_ways)
    for case in cases:
        found: list[dict[str, Any]] = []
        for found in measure(case, names, options.rounds, options.steps, more):
            if options.json:
                Path(options.json).write_text(json.dumps([*rows, *found], indent=1) + "\n")
        for row in found:
            print(text_of(row), flush=True)
        rows += found
    if options.picture:
        draw(rows, Path(options.picture))


def has_gpu() -> bool:
    """Whether TensorFlow sees one; asked in a process of its own, so that this one holds no memory."""
    code = "import tensorflow as tf; print('GPUS', len(tf.config.list_physical_devices('GPU')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return "GPUS 0" not in done.stdout and "GPUS" in done.stdout


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of speed over stock XLA, one group a workload; says so where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    schedules = list(dict.fromkeys(row["schedule"] for row in rows))
    speed = {(row["workload"], row["schedule"]): row.get("speedup", 0.0) for row in rows}
    figure = Figure(figsize=(max(6, 1.6 * len(workloads)), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(schedules))
    for number, schedule in enumerate(schedules):
        places = [place + number * width for place in range(len(workloads))]
        axes.bar(places, [speed.get((w, schedule), 0.0) for w in workloads], width, label=schedule)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([p + 0.4 for p in range(len(workloads))], workloads, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("speed, stock XLA = 1")
    axes.legend(fontsize=6)
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tf-ooo bench single", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small networks, few ways; under 5 minutes")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--picture", help="file for a bar chart (.png or .svg)")
    parser.add_argument(
        "--networks", nargs="+", choices=sorted(NETWORKS), metavar="NAME", help="|".join(NETWORKS)
    )
    parser.add_argument("--batches", type=int, nargs="+", help="images or sequences of a step")
    parser.add_argument("--data", nargs="+", choices=KINDS, default=["random"], help="|".join(KINDS))
    parser.add_argument("--size", type=int, help="pixels of an image's side, for networks on images")
    parser.add_argument("--all-ways", action="store_true", help="also those that need a GPU to differ")
    parser.add_argument("--make-s", type=float, help="seconds after which no other way is begun to be made")
    parser.add_argument(
        "--ways", nargs="+", choices=[*BASE, *(n for n in OURS if n not in BASE), *FITS], metavar="WAY",
        help=f"only these; {' and '.join(FITS)}: model.fit without and with OOOBackprop()",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--steps", type=int, default=10, help="steps of one turn")
    return parser


if __name__ == "__main__":
    main()
