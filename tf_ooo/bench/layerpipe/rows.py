"""The rows of ``tf-ooo bench layerpipe``."""

from __future__ import annotations

from tf_ooo.bench.layerpipe.messages import LayerPipeMeasured
from tf_ooo.bench.shared.rows import Row, efficiency_of, seconds_of, spread_text

BASELINE = "pipedream"


def rows_of(measured: LayerPipeMeasured, workload: str) -> list[Row]:
    """One row for each schedule."""
    times, devices = measured["times"], measured["devices"]
    return [
        {
            "workload": workload,
            "mode": "pipeline" if name == "fast_forward" else "layerpipe",
            "schedule": name,
            "baseline": BASELINE,
            "devices": devices,
            "cores": measured["cores"],
            **seconds_of(times[name], times[BASELINE]),
            **efficiency_of(times[name], times["serial"], devices),
            "link": measured["link"],
            **run,
        }
        for name, run in measured["runs"].items()
    ]


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
