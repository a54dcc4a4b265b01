"""LayerPipe against PipeDream, PipeDream-2BW and a synchronous pipeline, on worker processes.

The workers have equal shares of this machine: their computing threads get a CPU quota, communication is left
free.  All modes take turns, beside the whole model on one worker.  With ``--simulated`` for 2 to 16
processors, without TensorFlow or any process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tf_ooo.bench.layerpipe import accuracy as layerpipe_accuracy
from tf_ooo.bench.layerpipe.networks import NETWORKS
from tf_ooo.bench.pipeline.command import SHARE, run_driver, write
from tf_ooo.bench.planner import layerpipe as planner_layerpipe
from tf_ooo.bench.shared import confine
from tf_ooo.bench.shared.bars import save_bars
from tf_ooo.bench.shared.command import seconds_of

BASELINE = "pipedream"
# Beside the baseline.
SCHEDULES = ("fast_forward", "pipedream_2bw", "layerpipe", "layerpipe_ema")
DRIVER = "tf_ooo.bench.layerpipe.driver"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its rows."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--accuracy" in given:
        given.remove("--accuracy")
        layerpipe_accuracy.main(given)
        return
    options = _parser().parse_args(given)
    if options.simulated:
        simulated(options)
        return
    reason = confine.why_not(with_link=False)
    if reason:
        print(f"skipped: {reason}")
        return
    if options.quick:
        options.workload, options.devices, options.repetitions = ["mlp"], [2], 2
    rows: list[dict[str, Any]] = []
    asked = dict.fromkeys(options.schedules)
    for workload in options.workload:
        for devices in options.devices:
            more = ["--workload", workload, "--schedules", ",".join({BASELINE: None, **asked})]
            rows += rows_of(run_driver(DRIVER, options, devices, more), workload)
            write(options.json, rows)
    if options.png:
        save_bars(rows, options.png)


def simulated(options: argparse.Namespace) -> None:
    """The planner's comparison, with the same files."""
    asked = [(f"--{name}", getattr(options, name)) for name in ("json", "png")]
    given = [text for name, value in asked if value for text in (name, value)]
    planner_layerpipe.main([*given, *(["--quick"] if options.quick else [])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("tf-ooo bench layerpipe", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the MLP on 2 workers, under 5 minutes")
    parser.add_argument("--accuracy", action="store_true", help="instead: on digits; has options of its own")
    parser.add_argument("--simulated", action="store_true", help="of all workloads, for 2 to 16 processors")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--png", help="file for a picture of the rows")
    parser.add_argument("--workload", nargs="+", default=["mlp"], choices=NETWORKS)
    parser.add_argument(
        "--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES, help="rows to measure"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4], help="worker processes")
    parser.add_argument("--cores", type=float, help=f"of each worker; default: {SHARE} of an equal share")
    parser.add_argument("--repetitions", type=int, default=6, help="turns of each mode")
    return parser


def rows_of(found: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    """One row for each mode, printed as a line too."""
    times, devices = found["times"], found["devices"]
    rows = []
    for name, one in found["runs"].items():
        row = {
            "workload": workload,
            "mode": "pipeline" if name == "fast_forward" else "layerpipe",
            "schedule": name,
            "baseline": BASELINE,
            "devices": devices,
            "cores": found["cores"],
            **seconds_of(times, name, BASELINE, devices),
            "link": found["link"],
            **{key: value for key, value in one.items() if key != "schedule"},
        }
        rows.append(row)
        print(text_of(row), flush=True)
    return rows


def text_of(row: dict[str, Any]) -> str:
    """One line."""
    sent = f", sends {row['sent_bytes'] / 1e6:.1f} MB a step" if "sent_bytes" in row else ""
    versions = sum(row.get("weight_version_bytes", {}).values())
    kept = f", keeps {versions / 1e6:.1f} MB of earlier weights" if versions else ""
    return (
        f"{row['workload']} P={row['devices']:<3d} {row['schedule']:14s} {row['step_s'] * 1e3:6.0f} ms "
        f"({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f}), predicted "
        f"{row['predicted_step_s'] * 1e3:.0f}, {row['speedup']:.2f}x {BASELINE}, efficiency "
        f"{row['efficiency']:.2f}{sent}{kept}"
    )


if __name__ == "__main__":
    main()
