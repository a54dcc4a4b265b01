"""Draws a timeline as a PNG (or PDF, SVG): lanes above, memory below."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_ooo import units
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.task import KIND_NUMBER, KINDS
from tf_ooo.planning.pictures import style
from tf_ooo.planning.pictures.page import title
from tf_ooo.planning.pictures.style import Bars, View, bars_of, curve_points, view_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tf_ooo.planning.simulation.timeline import Timeline

_MOST_TASKS, _MOST_LANES, _MOST_LEGEND = 100_000, 128, 8
_BAR = 0.84
_WIDTH_IN, _ROW_IN, _LEAST_ROW_IN, _ALL_ROWS_IN, _MEMORY_IN = 12.0, 0.36, 0.12, 6.0, 1.8
# Inches that a letter of a label takes, and the least distance to the ends of its bar.
_LETTER_IN, _MARGIN_IN = 0.066, 0.04


def save_png(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the picture; the file's ending chooses the format.  BackendError: matplotlib cannot."""
    picture = draw(timeline)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        picture.savefig(target, dpi=150)
    except ValueError as error:
        raise BackendError(f"{path}: {error}") from error


def image(timeline: Timeline) -> str:
    """Return the picture as an HTML element."""
    file = io.BytesIO()
    draw(timeline).savefig(file, format="png", dpi=80)
    return f'<img alt="Gantt chart" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def draw(timeline: Timeline) -> Figure:
    """Return the picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    view = view_of(timeline, _MOST_TASKS, _MOST_LANES)
    rows_in = len(view.lanes) * max(min(_ROW_IN, _ALL_ROWS_IN / max(len(view.lanes), 1)), _LEAST_ROW_IN)
    memory_in = _MEMORY_IN if timeline.memory else 0.01
    picture = Figure(figsize=(_WIDTH_IN, rows_in + memory_in + 1.4), layout="constrained")
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=[max(rows_in, 0.4), memory_in])
    end_s = min(timeline.makespan_s, view.until_s)
    unit = units.time_unit(end_s)
    _draw_tasks(above, timeline, view, unit, end_s)
    _draw_memory(below, timeline, view, unit, end_s)
    facts = f"makespan {units.time_text(timeline.makespan_s)}, bubble {timeline.bubble_fraction:.1%}"
    heading = f"{title(timeline)}: {facts}\n{view.note}".rstrip()
    picture.suptitle(heading, fontsize=10, x=0.01, ha="left")
    return picture


def _draw_tasks(axes: Axes, timeline: Timeline, view: View, unit: units.Unit, end_s: float) -> None:
    from matplotlib.collections import PolyCollection

    bars = bars_of(timeline, view)
    for kind in KINDS:
        some = bars.of_kind(KIND_NUMBER[kind])
        if len(some):
            line = 0.4 if len(bars) < 2000 else 0.0
            boxes = PolyCollection(_boxes(some, unit), facecolors=style.COLOURS[kind], edgecolors="white",
                                   linewidths=line, label=style.NAMES[kind])  # fmt: skip
            axes.add_collection(boxes)
    _write_labels(axes, bars, timeline, unit, end_s)
    labels = [style.lane_label(timeline.schedule, lane) for lane in view.lanes]
    axes.set_yticks(range(len(labels)), labels, fontsize=8 if len(labels) <= 40 else 5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, end_s / unit.size if end_s else 1)
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(KINDS), fontsize=8, frameon=False)


def _boxes(bars: Bars, unit: units.Unit) -> Any:
    left, right = bars.start_s / unit.size, bars.end_s / unit.size
    top, bottom = bars.lane - _BAR / 2, bars.lane + _BAR / 2
    across = np.stack([left, right, right, left], axis=1)
    return np.stack([across, np.stack([top, top, bottom, bottom], axis=1)], axis=2)


def _write_labels(axes: Axes, bars: Bars, timeline: Timeline, unit: units.Unit, end_s: float) -> None:
    """Write the names of tasks into bars that have room for them."""
    room_in = (bars.end_s - bars.start_s) / end_s * (_WIDTH_IN - 1.2) if end_s else bars.start_s
    for i, text in enumerate(style.labels_of(bars, timeline.schedule)):
        if room_in[i] > max(len(text) * _LETTER_IN + _MARGIN_IN, 2 * _LETTER_IN):
            middle = (bars.start_s[i] + bars.end_s[i]) / 2 / unit.size
            colour = style.TEXT_COLOURS[KINDS[bars.fields.kind[i]]]
            axes.text(middle, bars.lane[i], text, ha="center", va="center", fontsize=7, color=colour,
                      clip_on=True)  # fmt: skip


def _draw_memory(axes: Axes, timeline: Timeline, view: View, unit: units.Unit, end_s: float) -> None:
    from matplotlib import colormaps

    size = units.bytes_unit(max(timeline.peak_bytes, default=0))
    devices = [device for device in view.devices if device < len(timeline.memory)]
    for place, device in enumerate(devices):
        colour = colormaps["viridis"](0.8 * place / max(len(devices) - 1, 1))
        time_s, alive = curve_points(timeline.memory[device], view.until_s, end_s)
        axes.step(time_s / unit.size, alive / size.size, where="post", color=colour, linewidth=1.2,
                  label=f"device {device}")  # fmt: skip
    axes.set_xlabel(f"time, {unit.name}", fontsize=8)
    axes.set_ylabel(f"memory, {size.name}", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if not devices:
        axes.set_visible(False)
    elif len(devices) <= _MOST_LEGEND:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    else:
        axes.set_title(f"device {devices[0]} dark to device {devices[-1]} light", fontsize=8, loc="right")
