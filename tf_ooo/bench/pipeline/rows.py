"""The rows of ``tf-ooo bench pipeline``."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.bench.pipeline.messages import PipelineMeasured
from tf_ooo.bench.shared.rows import Row, bits_text, efficiency_of, known, seconds_of, spread_text

BASELINE = "gpipe"


def rows_of(measured: PipelineMeasured, workload: str, microbatches: int) -> list[Row]:
    """One row for each schedule."""
    return [_row(measured, name, workload, microbatches) for name in measured["schedules"]]


def _row(measured: PipelineMeasured, name: str, workload: str, microbatches: int) -> Row:
    times, schedules, devices = measured["times"], measured["schedules"], measured["devices"]
    run = schedules[name]
    return known(
        {
            "workload": workload,
            "mode": "pipeline",
            "schedule": name,
            "runs": run["schedule"],
            "baseline": BASELINE if BASELINE in times else None,
            "devices": devices,
            "microbatches": microbatches,
            "cores": measured["cores"],
            **seconds_of(times[name], times.get(BASELINE)),
            "predicted_step_s": run["predicted_step_s"],
            "bound_s": seconds_of(times["local"], None)["step_s"] if "local" in times else None,
            **efficiency_of(times[name], times["serial"], devices),
            "bubble_fraction": run["bubble_fraction"],
            "bubble_fraction_by_device": run["bubble_fraction_by_device"],
            "planned_step_s": run["planned_step_s"],
            "predicted_bubble_fraction": run["predicted_bubble_fraction"],
            "peak_bytes": run["peak_bytes"],
            "measured_peak_bytes": run["measured_peak_bytes"],
            "link": measured["link"],
            "tasks_seen": run["tasks_seen"],
            "task_seconds": run["tasks"],
            "bit_equal": run["bits"] == schedules.get(BASELINE, run)["bits"],
        }
    )


def text_of(row: Row) -> str:
    """One line."""
    speedup = f"  {row['speedup']:.2f}x {row['baseline']}" if "speedup" in row else ""
    return (
        f"{shape_text(row)} {row['schedule']:14s} {spread_text(row)}, predicted "
        f"{row['predicted_step_s'] * 1e3:.0f}, local {row.get('bound_s', 0) * 1e3:.0f}{speedup}, efficiency "
        f"{row['efficiency']:.2f}, bubble {row['bubble_fraction']:.0%} (predicted "
        f"{row['predicted_bubble_fraction']:.0%}), peak {_megabytes(row['measured_peak_bytes'])} MB "
        f"(predicted {_megabytes(row['peak_bytes'])}), {bits_text(row)}"
    )


def shape_text(row: Row) -> str:
    """What was trained, with how many devices and micro-batches; in a column."""
    return f"{row['workload']} P={row['devices']} m={row['microbatches']}".ljust(28)


def _megabytes(sizes: Sequence[float]) -> str:
    return "/".join(f"{size / 1e6:.0f}" for size in sizes)
