"""The rows of ``tf-ooo bench single``, and a picture of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tf_ooo.bench.shared.rows import Row, known, seconds_of
from tf_ooo.bench.single.ways import STOCK


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


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of speed over stock XLA, one group for each workload."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    schedules = list(dict.fromkeys(row["schedule"] for row in rows))
    speed = {(row["workload"], row["schedule"]): row.get("speedup", 0.0) for row in rows}
    figure = Figure(figsize=(max(6, 1.6 * len(workloads)), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(schedules))
    for number, schedule in enumerate(schedules):
        places = [place + number * width for place in range(len(workloads))]
        axes.bar(places, [speed.get((w, schedule), 0.0) for w in workloads], width, label=schedule)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([p + 0.4 for p in range(len(workloads))], workloads, rotation=30, ha="right", fontsize=7)
    axes.set_ylabel("speed, stock XLA = 1")
    axes.legend(fontsize=6)
    figure.savefig(path)
