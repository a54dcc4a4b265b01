"""What a run of ``tf-ooo bench layerpipe`` is asked for, and the rows that come of it."""

from __future__ import annotations

from dataclasses import dataclass

from tf_ooo.bench.shared.drivers import Measured, row_of
from tf_ooo.bench.shared.rows import Row, spread_text
from tf_ooo.bench.shared.workloads import LAYERPIPE

BASELINE = "pipedream"
# What a user would take otherwise: weights as late, one update late, not late.
BASELINES = (BASELINE, "pipedream_2bw", "fast_forward")


@dataclass(frozen=True)
class LayerPipeRun:
    """A workload of :data:`tf_ooo.bench.shared.workloads.LAYERPIPE`, and schedules to train it with."""

    workload: str
    schedules: list[str]


def rows_of(measured: Measured, workload: str) -> list[Row]:
    """One row for each schedule."""
    about = {"workload": workload, "batch_rows": LAYERPIPE[workload].batch}
    return [row_of(measured, about, name, BASELINE) for name in measured["runs"]]


def text_of(row: Row) -> str:
    """One line."""
    sent = f", sends {row['sent_bytes'] / 1e6:.1f} MB a step" if "sent_bytes" in row else ""
    versions = sum(row.get("weight_version_bytes", {}).values())
    kept = f", keeps {versions / 1e6:.1f} MB of earlier weights" if versions else ""
    return (
        f"{row['workload']} P={row['devices']:<3d} {row['schedule']:14s} {spread_text(row)}, predicted "
        f"{row['predicted_step_s'] * 1e3:.0f}, {row['speedup']:.2f}x {BASELINE}, efficiency "
        f"{row['efficiency']:.2f}{sent}{kept}"
    )
