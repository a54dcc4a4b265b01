"""Data parallel training against stock Horovod, on one machine: ``tf-ooo bench data-parallel``.

Each worker has its share of the CPU, all of them one link of chosen bandwidth.  In every run all
configurations take turns, so that a disturbance hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_ooo.bench.data_parallel.worker import CONFIGURATIONS
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.bars import save_bars
from tf_ooo.bench.shared.command import write_rows
from tf_ooo.bench.shared.networks import WORKLOADS

# Horovod's own knobs, milliseconds and bytes: what is tried for "tuned"; it ships with 1 and 128 MiB.
TUNING = (("1", "8388608"), ("3", "8388608"), ("1", "2097152"), ("10", "134217728"))
TUNED = "horovod_tuned"
ALL, QUICK = ",".join((*CONFIGURATIONS, TUNED)), "horovod,local,auto"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its rows."""
    options = _parser().parse_args(arguments)
    reason = confine.why_not()
    if reason:
        print(f"skipped: {reason}")
        return
    if options.workers < 2 or options.workers * options.cores > (os.cpu_count() or 1):
        raise SystemExit(
            f"{options.workers} workers of {options.cores} core: there have to be two or more, with no more "
            f"than this machine's {os.cpu_count()} cores together; see --workers and --cores"
        )
    rows: list[dict[str, Any]] = []
    for bandwidth in options.mbit:
        asked = (options.configurations or (QUICK if options.quick else ALL)).split(",")
        names = list(dict.fromkeys(["horovod", *asked]))  # what all are compared with
        found = _run(options, bandwidth, [name for name in names if name != TUNED])
        tuned = [_tuned(options, bandwidth, *knobs) for knobs in TUNING] if TUNED in names else []
        made = rows_of(found, options.workload, bandwidth, tuned)
        print("\n".join(map(text_of, made)), flush=True)
        rows += made
        write_rows(options.json, rows)  # after each bandwidth: what was measured is not lost
    if options.png:
        save_bars(rows, options.png)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tf-ooo bench data-parallel", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one workload, one bandwidth, under 5 minutes")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--png", type=Path, help="file for a picture")
    parser.add_argument("--workload", default="mlp", choices=WORKLOADS)
    parser.add_argument(
        "--mbit", type=_bandwidths, default=[1000.0], help="Mbit/s, several with commas; none: no limit"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes")
    cores = "of each worker, for computing; 1: one of its own, without a quota"
    parser.add_argument("--cores", type=float, default=0.5, help=cores)
    parser.add_argument("--rows", type=int, default=0, help="of each worker's batch; default: the workload's")
    parser.add_argument("--steps", type=int, default=4, help="of one execution")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--configurations", help=f"of {ALL}; with --quick: {QUICK}")
    return parser


def _bandwidths(text: str) -> list[float]:
    return [0.0 if one == "none" else float(one) for one in text.split(",")]


def _tuned(options: argparse.Namespace, mbit: float, cycle_ms: str, fusion_bytes: str) -> dict[str, Any]:
    """Stock Horovod with knobs of its own: its times, and the knobs."""
    knobs = {"HOROVOD_CYCLE_TIME": cycle_ms, "HOROVOD_FUSION_THRESHOLD": fusion_bytes}
    found = _run(options, mbit, ["horovod"], knobs)["configurations"]["horovod"]
    return {**found, "knobs": knobs}


def _run(
    options: argparse.Namespace, mbit: float, names: Sequence[str], knobs: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What rank 0 of one run has found."""
    prefix = f"tf_ooo_bench_{os.getpid()}_"
    with (
        tempfile.TemporaryDirectory() as folder,
        confine.link(prefix + "net", mbit * 1e6 if mbit else None) as inside,
        confine.shares(prefix, options.workers, options.cores),
    ):
        out = Path(folder) / "out.json"
        launcher = Path(sys.executable).with_name("horovodrun")
        command = [*inside, str(launcher), "--gloo", "--network-interfaces", "lo"]
        command += ["-np", str(options.workers)]
        command += [sys.executable, "-m", "tf_ooo.bench.data_parallel.worker", "--out", str(out)]
        command += ["--workload", options.workload, "--group", prefix, "--configurations", ",".join(names)]
        command += ["--steps", str(options.steps), "--repetitions", str(options.repetitions)]
        command += ["--rows", str(options.rows)]
        path = f"{launcher.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = os.environ | dict(knobs or {}) | {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            raise SystemExit(f"a worker failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def rows_of(
    first: dict[str, Any], workload: str, mbit: float, tuned: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """One row for each configuration, beside stock Horovod as it ships; of the ``tuned`` runs the best."""
    runs = dict(first["configurations"])
    if tuned:
        runs[TUNED] = min(tuned, key=lambda one: statistics.median(one["seconds"]))
    local_s = statistics.median(runs.pop("local")["seconds"]) if "local" in runs else None
    stock_s = statistics.median(runs["horovod"]["seconds"])
    bound_s = None if local_s is None else max(local_s, first["communication_s"])
    rows = []
    for name, one in runs.items():
        step_s = statistics.median(one["seconds"])
        row = {
            "workload": workload,
            "mode": "data_parallel",
            "schedule": name,
            "runs": one.get("schedule"),
            "baseline": "horovod",
            "devices": first["workers"],
            "bandwidth_bit_s": mbit * 1e6 or None,
            "step_s": step_s,
            "step_s_min": min(one["seconds"]),
            "step_s_max": max(one["seconds"]),
            "baseline_step_s": stock_s,
            "speedup": stock_s / step_s,
            "predicted_step_s": one.get("predicted_step_s"),
            "bound_s": bound_s,
            "over_bound": None if bound_s is None else step_s / bound_s,
            "compute_s": local_s,
            "communication_s": first["communication_s"],
            "bit_equal": one["bits"] == runs["horovod"]["bits"],
            "reason": one.get("reason") or None,
            "knobs": one.get("knobs"),
        }
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def text_of(row: dict[str, Any]) -> str:
    """One line."""
    mbit = row.get("bandwidth_bit_s", 0) / 1e6
    more = f", predicted {row['predicted_step_s'] * 1e3:.0f} ms" if "predicted_step_s" in row else ""
    bound = (
        f", {row['over_bound']:.2f} of {row['bound_s'] * 1e3:.0f} ms, the bound" if "bound_s" in row else ""
    )
    bits = "same bits" if row["bit_equal"] else "OTHER BITS"
    return (
        f"{row['workload']} {mbit:6.0f} Mbit/s  {row['schedule']:16s} {row['step_s'] * 1e3:7.1f} ms "
        f"({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f})  {row['speedup']:.2f}x"
        f"{more}{bound}, {bits}"
    )


if __name__ == "__main__":
    main()
