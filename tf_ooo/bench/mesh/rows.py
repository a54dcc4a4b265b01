"""What a run of ``tf-ooo bench mesh`` is asked for, its rows, and what all of them say together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from tf_ooo.bench.shared.rows import Row

# Asked for: what is chosen takes so many times as long as the fastest, at most.
ASKED = 1.05
ONE_DEVICE = "one device"


@dataclass(frozen=True)
class MeshRun:
    """One model; ``replicas`` to measure, each a number of those that share the devices."""

    case: str
    microbatches: int
    replicas: tuple[int, ...]


class MeshMeasured(TypedDict):
    """Seconds of a step in each turn, and what was predicted before any ran, by what ran."""

    devices: int
    cores: float
    times: dict[str, list[float]]
    predicted_s: dict[str, float]
    schedules: dict[str, str]
    chosen: str
    environment: str
    date: str


def name_of(replicas: int, devices: int) -> str:
    """``2 x 2``: replicas and the devices of each."""
    return f"{replicas} x {devices // replicas}"


def row_of(measured: MeshMeasured, asked: MeshRun) -> Row:
    """One model: how long each takes, which is the fastest, and how much longer the chosen one takes."""
    medians = {name: statistics.median(times) for name, times in measured["times"].items()}
    of_plans = {name: step_s for name, step_s in medians.items() if name != ONE_DEVICE}
    fastest = min(of_plans, key=lambda name: of_plans[name])
    chosen = measured["chosen"]
    return {
        "workload": asked.case,
        "microbatches": asked.microbatches,
        **{key: measured[key] for key in ("devices", "cores", "environment", "date", "schedules")},
        "step_s": medians,
        "turns_s": {name: [round(s, 4) for s in times] for name, times in measured["times"].items()},
        "predicted_s": measured["predicted_s"],
        "chosen": chosen,
        "fastest": fastest,
        "longer": of_plans[chosen] / of_plans[fastest],
        "over_one_device": medians[ONE_DEVICE] / of_plans[chosen],
    }


def text_of(row: Row) -> str:
    """One line."""
    parts = [
        f"{name} {step_s * 1e3:.0f} ms" + _predicted_text(row["predicted_s"], name)
        for name, step_s in row["step_s"].items()
    ]
    best = "the fastest" if row["chosen"] == row["fastest"] else f"{row['fastest']} is faster"
    return (
        f"{row['workload']:<14} {', '.join(parts)}; chosen {row['chosen']}: {best}, {row['longer']:.2f} "
        f"times its step, {row['over_one_device']:.2f} times as fast as one device"
    )


def _predicted_text(predicted_s: Mapping[str, float], name: str) -> str:
    return f" (predicted {predicted_s[name] * 1e3:.0f})" if name in predicted_s else ""


def summary_of(rows: Sequence[Row]) -> str:
    """How often the fastest was chosen, and how far off the others are."""
    right = sum(row["chosen"] == row["fastest"] for row in rows)
    near = sum(row["longer"] <= ASKED for row in rows)
    worst = max(row["longer"] for row in rows)
    return (
        f"the fastest was chosen for {right} of {len(rows)} models, one within {ASKED - 1:.0%} of it for "
        f"{near}; at most {worst:.2f} times its step"
    )
