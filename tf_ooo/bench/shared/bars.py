"""A picture of benchmark rows: one bar for each measured step, its spread, its prediction and its bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tf_ooo.bench.shared.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4c78a8", "#9ecae9", "#bab0ac", "#e45756", "#f58518", "#72b7b2", "#54a24b", "#b279a2", "#ff9da6")


def save_bars(rows: Sequence[Row], path: Path) -> None:
    """Writes a picture: a group of bars for each workload and bandwidth, steps relative to the baseline's."""
    from matplotlib.figure import Figure  # slow to import

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row)
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    figure = Figure(figsize=(max(6.0, 1.5 + 0.45 * (len(rows) + len(groups))), 4.5), layout="constrained")
    axes = figure.add_subplot()
    place, ticks, drawn = 0.0, [], set()
    for members in groups.values():
        ticks.append(place + (len(members) - 1) / 2)
        for row in members:
            name = row["schedule"]
            _bar(axes, place, row, colours[name], None if name in drawn else name)
            drawn.add(name)
            place += 1
        _bound(axes, place - len(members), place - 1, members)
        place += 1
    axes.set_xticks(ticks, list(groups))
    axes.set_ylabel("step time / baseline's (x: predicted, dashes: bound)")
    axes.legend(ncols=min(4, len(names)), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    figure.savefig(path, dpi=120)


def _group(row: Row) -> str:
    bandwidth = row.get("bandwidth_bit_s")
    devices = f"\nP={row['devices']}" if row.get("mode") in ("pipeline", "layerpipe") else ""
    return str(row["workload"]) + devices + (f"\n{bandwidth / 1e6:.0f} Mbit/s" if bandwidth else "")


def _bar(axes: Axes, place: float, row: Row, colour: str, label: str | None) -> None:
    base_s, step_s = row["baseline_step_s"], row["step_s"]
    spread = [[(step_s - row["step_s_min"]) / base_s], [(row["step_s_max"] - step_s) / base_s]]
    axes.bar(place, step_s / base_s, 0.8, yerr=spread, color=colour, label=label, capsize=3)
    axes.annotate(f"{base_s / step_s:.2f}x", (place, 0.03), ha="center", fontsize=7, rotation=90)
    if "predicted_step_s" in row:
        axes.plot(place, row["predicted_step_s"] / base_s, "x", color="black")


def _bound(axes: Axes, begin: float, end: float, members: Sequence[Row]) -> None:
    bounds = [row["bound_s"] / row["baseline_step_s"] for row in members if "bound_s" in row]
    if bounds:
        axes.hlines(bounds[0], begin - 0.45, end + 0.45, colors="black", linestyles="dashed", linewidth=1)
