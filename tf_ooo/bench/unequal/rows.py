"""What a run of ``tf-ooo bench unequal`` is asked for, and its rows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TypedDict

from tf_ooo.bench.shared.rows import Row, seconds_of, spread_text

ALIKE, OWN_SPEEDS, CHOSEN, ONE_DEVICE = "alike", "own speeds", "chosen", "one device"


@dataclass(frozen=True)
class UnequalRun:
    """One model; the last worker has ``slow`` of the others' CPU."""

    case: str
    microbatches: int
    slow: float


class UnequalMeasured(TypedDict):
    """Seconds of a step in each turn, by what ran, and predicted ones."""

    devices: int
    cores: float
    speeds: list[float]
    used: list[int]
    times: dict[str, list[float]]
    predicted_s: dict[str, float]
    environment: str
    date: str


def row_of(measured: UnequalMeasured, asked: UnequalRun) -> Row:
    """Of what is planned for the workers' own speeds, beside the plan for workers that are alike."""
    times = measured["times"]
    kept = ("devices", "cores", "speeds", "used", "predicted_s", "environment", "date")
    return {
        "workload": asked.case,
        "microbatches": asked.microbatches,
        "slow": asked.slow,
        **{key: measured[key] for key in kept},  # type: ignore[literal-required]
        **seconds_of(times[OWN_SPEEDS], times[ALIKE]),
        "turns_s": {name: [round(s, 4) for s in seconds] for name, seconds in times.items()},
        "medians_s": {name: statistics.median(seconds) for name, seconds in times.items()},
    }


def text_of(row: Row) -> str:
    """One line."""
    speeds = ", ".join(f"{speed:.2g}" for speed in row["speeds"]) or "all alike"
    beside = ", ".join(
        f"{name} {row['medians_s'][name] * 1e3:.0f} ms" for name in (ALIKE, CHOSEN, ONE_DEVICE)
    )
    return (
        f"{row['workload']:<14} speeds {speeds}: {spread_text(row).strip()}, "
        f"predicted {row['predicted_s'][OWN_SPEEDS] * 1e3:.0f}, {row['speedup']:.2f} times as fast as if "
        f"all were alike; {beside}; chosen: {len(row['used'])} of {row['devices']} workers"
    )
