"""The command line that the planner's benches share."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def parser_of(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """With ``--json`` and ``--quick``, which all benches have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def write_rows(path: Path | None, found: Sequence[Row]) -> None:
    """Writes the rows as JSON; nothing without a path."""
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


def show(found: Sequence[Row], table: Callable[[Sequence[Row]], str], assumptions: Iterable[str]) -> None:
    """Prints the rows and what was assumed."""
    print(table(found))
    print("Assumptions:", *(f"- {line}" for line in assumptions), sep="\n")


def seconds_of(
    times: Mapping[str, Sequence[float]], name: str, baseline: str, devices: int, serial: str = "serial"
) -> Row:
    """Of runs in turns, what a row says of one: median, spread, and beside the baseline and one device.

    Args:
        times: seconds of each run's turns.
        name, baseline, serial: of runs, the last on one device.
        devices: of the run.
    """
    medians = {one: statistics.median(seconds) for one, seconds in times.items()}
    return {
        "step_s": medians[name],
        "step_s_min": min(times[name]),
        "step_s_max": max(times[name]),
        "baseline_step_s": medians[baseline],
        "speedup": medians[baseline] / medians[name],
        "serial_s": medians[serial],
        "efficiency": medians[serial] / (devices * medians[name]),
    }


def link_text(row: Row) -> str:
    """``200 Gbit/s``, or ``free`` for a link that takes no time."""
    rate = row.get("bandwidth_bit_s")
    return f"{rate / 1e9:.0f} Gbit/s" if rate else "free"
