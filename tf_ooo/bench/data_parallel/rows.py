"""The rows of ``tf-ooo bench data-parallel``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tf_ooo.bench.data_parallel.messages import ConfigurationMeasured, DataParallelMeasured
from tf_ooo.bench.shared.rows import Row, bits_text, known, seconds_of

BASELINE, LOCAL, TUNED = "horovod", "local", "horovod_tuned"


def rows_of(
    measured: DataParallelMeasured, workload: str, mbit: float, tuned: Sequence[ConfigurationMeasured] = ()
) -> list[Row]:
    """One row for each configuration, beside stock Horovod as it ships; of the ``tuned`` runs the best."""
    runs = dict(measured["configurations"])
    if tuned:
        runs[TUNED] = min(tuned, key=lambda run: statistics.median(run["seconds"]))
    stock = runs[BASELINE]
    local_s = statistics.median(runs.pop(LOCAL)["seconds"]) if LOCAL in runs else None
    bound_s = None if local_s is None else max(local_s, measured["communication_s"])
    rows = []
    for name, run in runs.items():
        seconds = seconds_of(run["seconds"], stock["seconds"])
        rows.append(
            {
                "workload": workload,
                "mode": "data_parallel",
                "schedule": name,
                "runs": run.get("schedule"),
                "baseline": BASELINE,
                "devices": measured["workers"],
                "bandwidth_bit_s": mbit * 1e6 or None,
                **seconds,
                "predicted_step_s": run.get("predicted_step_s"),
                "bound_s": bound_s,
                "over_bound": None if bound_s is None else seconds["step_s"] / bound_s,
                "compute_s": local_s,
                "communication_s": measured["communication_s"],
                "bit_equal": run["bits"] == stock["bits"],
                "reason": run.get("reason") or None,
                "knobs": run.get("knobs"),
            }
        )
    return [known(row) for row in rows]


def text_of(row: Row) -> str:
    """One line."""
    mbit = row.get("bandwidth_bit_s", 0) / 1e6
    more = f", predicted {row['predicted_step_s'] * 1e3:.0f} ms" if "predicted_step_s" in row else ""
    if "bound_s" in row:
        more += f", {row['over_bound']:.2f} of {row['bound_s'] * 1e3:.0f} ms, the bound"
    return (
        f"{row['workload']} {mbit:6.0f} Mbit/s  {row['schedule']:16s} {row['step_s'] * 1e3:7.1f} ms "
        f"({row['step_s_min'] * 1e3:.0f}-{row['step_s_max'] * 1e3:.0f})  {row['speedup']:.2f}x"
        f"{more}, {bits_text(row)}"
    )
