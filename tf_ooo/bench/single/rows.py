"""The rows of ``tf-ooo bench single``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tf_ooo.bench.shared.rows import Row, known, seconds_of
from tf_ooo.bench.single.cases import STOCK


def rows_of(
    workload: str,
    device: str,
    taken: Mapping[str, Sequence[float]],
    peaks: Mapping[str, int],
    said: Mapping[str, str],
) -> list[Row]:
    """One row for each way, beside stock XLA.

    Args:
        workload: name of the case.
        device: that it ran on.
        taken: seconds of a step in each turn, by way.
        peaks: bytes; said: notes.
    """
    return [
        known(
            {
                "workload": workload,
                "mode": "single_device",
                "schedule": name,
                "baseline": STOCK,
                "device": device,
                **seconds_of(seconds, taken.get(STOCK)),
                "peak_bytes": peaks.get(name) or None,
                "note": said.get(name) or None,
            }
        )
        for name, seconds in taken.items()
    ]


def text_of(row: Row) -> str:
    """One line."""
    low, high = row["step_s_min"] * 1e3, row["step_s_max"] * 1e3
    peak = f"  {row['peak_bytes'] / 2**20:.0f} MiB" if "peak_bytes" in row else ""
    return (
        f"{row['workload']:32s} {row['schedule']:36s} {row['step_s'] * 1e3:8.2f} ms ({low:.2f}-{high:.2f})  "
        f"{row.get('speedup', 0):.2f}x{peak}  device: {row['device']}"
    )
