"""What one fit is asked for, its row, and what all runs of a workload say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.bench.shared.rows import Row

# Asked for: predictions are no further off.
ASKED = 0.15


@dataclass(frozen=True)
class PredictionRun:
    """One fit of a workload, and so many steps of its plan; ``repetition`` counts from 1."""

    case: str
    steps: int
    repetition: int = 1


def error_of(predicted_s: float, step_s: Sequence[float]) -> float:
    """By how much the prediction is too high (below 0: too low), of the median step."""
    return predicted_s / statistics.median(step_s) - 1


def text_of(row: Row) -> str:
    """One line."""
    if "failed" in row:
        return f"{row['workload']:<12} run {row['repetition']}  failed: {row['failed']}"
    where = f"{row['devices']} {row['where']}"
    spread = f"({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f}, {len(row['step_s'])} steps)"
    return (
        f"{row['workload']:<12} run {row['repetition']}  {where:<18} {row['runs']:<16} predicted "
        f"{row['predicted_s'] * 1e3:7.1f} ms, measured {row['measured_s'] * 1e3:7.1f} ms {spread}  "
        f"{row['error']:+.0%}"
    )


def summary_of(rows: Sequence[Row]) -> list[str]:
    """For each workload the errors of all its runs, least, median and greatest, and how many missed."""
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        errors = sorted(row["error"] for row in rows if row["workload"] == name and "error" in row)
        failed = sum(row["workload"] == name and "failed" in row for row in rows)
        if not errors:
            lines.append(f"{name:<12} {failed} failed")
            continue
        missed = sum(abs(error) > ASKED for error in errors)
        middle = statistics.median(errors)
        lines.append(
            f"{name:<12} {len(errors)} runs: {errors[0]:+.0%} / {middle:+.0%} / {errors[-1]:+.0%}, "
            f"{missed} of them more than {ASKED:.0%} off" + (f", {failed} failed" if failed else "")
        )
    within = [row for row in rows if "error" in row and abs(row["error"]) <= ASKED]
    lines.append(f"{len(within)} of {len(rows)} runs within {ASKED:.0%}")
    return lines
