"""A timeline as text for the terminal: a row for each lane, a column for each slice of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from tf_ooo.planning.model.arrays import Floats
from tf_ooo.planning.model.task import KINDS
from tf_ooo.planning.pictures import style
from tf_ooo.planning.pictures.bars import Bars, View, bars_of, view_of

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline

_MOST_TASKS, _MOST_LANES, _LEAST_COLUMNS = 200_000, 64, 8
_IDLE = "."
# Share of the tasks; above it the numbers of tasks are given up.
_MOST_HIDDEN = 0.2
_MEANING = {"F": "forward", "dO": "output grad", "dW": "weight grad", "U": "update", "comm": "comm"}


@dataclass(frozen=True)
class Cell:
    """One slice of time of a lane: what stands there, and the kind of the task that runs."""

    text: str
    kind: str | None = None


@dataclass(frozen=True)
class Grid:
    """All cells.  ``hidden`` tasks are too short for a slice of ``slice_s`` seconds."""

    labels: list[str]
    rows: list[list[Cell]]
    cell_width: int
    slice_s: float
    hidden: int
    legend: list[str]


def grid(timeline: Timeline, width: int = 100) -> str:
    """The grid, at most ``width`` columns wide, and a legend under it."""
    return "\n".join(line.rstrip() for line in coloured(timeline, width).plain.split("\n"))


def coloured(timeline: Timeline, width: int = 100) -> Text:
    """The grid for a terminal that shows colours, in those of the other pictures."""
    cells = make_grid(timeline, width)
    indent = max(map(len, cells.labels), default=0)
    text = Text(no_wrap=True)
    for label, row in zip(cells.labels, cells.rows, strict=True):
        text.append(f"{label:<{indent}} |")
        for cell in row:
            colour = f"{style.TEXT_COLOURS[cell.kind]} on {style.COLOURS[cell.kind]}" if cell.kind else "dim"
            text.append(cell.text.ljust(cells.cell_width), colour)
        text.append("\n")
    text.append("\n".join(cells.legend), "dim")
    return text


def make_grid(timeline: Timeline, width: int) -> Grid:
    """Cells show the task in the middle of their slice: its kind only, where too many would be hidden."""
    view = view_of(timeline, _MOST_TASKS, _MOST_LANES)
    bars = bars_of(timeline, view)
    cells = _filled(timeline, view, bars, width, style.numbering(timeline.schedule))
    if cells.hidden > len(bars) * _MOST_HIDDEN:
        cells = _filled(timeline, view, bars, width, "kind")
    return cells


def _filled(timeline: Timeline, view: View, bars: Bars, width: int, which: str) -> Grid:
    labels = [style.lane_label(timeline.schedule, lane) for lane in view.lanes]
    highest = int(bars.fields.stage.max(initial=0)), int(bars.fields.microbatch.max(initial=0))
    cell_width = 1 if which == "kind" else len(style.task_label("F", *highest, which)) + 1
    columns = max((width - max(map(len, labels), default=0) - 2) // cell_width, _LEAST_COLUMNS)
    end_s = min(timeline.makespan_s, float(bars.end_s.max(initial=0.0)))
    slice_s = _slice_s(bars, end_s, columns)
    count = min(int(np.ceil(end_s / slice_s - 1e-6)), columns) if slice_s else 0
    middles_s = (np.arange(count) + 0.5) * slice_s
    seen: set[int] = set()
    rows = [_row(bars, lane, middles_s, which, seen) for lane in range(len(view.lanes))]
    hidden = len(bars) - len(seen)
    legend = _legend(timeline, view, bars, which, slice_s, hidden)
    return Grid(labels, rows, cell_width, slice_s, hidden, legend)


def _slice_s(bars: Bars, end_s: float, columns: int) -> float:
    """The longest slice in which all times are whole numbers, if it fits; else all columns are used."""
    shortest_s = end_s / columns if columns else 0.0
    edges = np.unique(np.concatenate([bars.start_s, bars.end_s]))
    edges = edges[np.append(True, np.diff(edges) > 1e-9 * max(end_s, 1e-300))] if len(edges) else edges
    step_s = float(np.diff(edges).min(initial=end_s))
    for parts in (1, 2, 3, 4):
        unit_s = step_s / parts
        if unit_s < shortest_s * (1 - 1e-9) or not unit_s:
            break
        counts = edges / unit_s
        if np.abs(counts - counts.round()).max(initial=0.0) < 1e-3:
            return unit_s
    return shortest_s


def _row(bars: Bars, lane: int, middles_s: Floats, which: str, seen: set[int]) -> list[Cell]:
    places = np.flatnonzero(bars.lane == lane)
    places = places[np.argsort(bars.start_s[places], kind="stable")]
    if not len(places):
        return [Cell(_IDLE)] * len(middles_s)
    at = np.searchsorted(bars.start_s[places], middles_s, side="right") - 1
    cells = []
    before = -1
    for place, middle_s in zip(at.tolist(), middles_s.tolist(), strict=True):
        task = int(places[place]) if place >= 0 else -1
        if task < 0 or bars.end_s[task] <= middle_s:
            cells.append(Cell(_IDLE))
            before = -1
            continue
        cells.append(_cell(bars, task, which, task == before))
        seen.add(task)
        before = task
    return cells


def _cell(bars: Bars, task: int, which: str, goes_on: bool) -> Cell:
    fields = bars.fields
    kind = KINDS[fields.kind[task]]
    if which == "kind":
        return Cell(style.SHORT[kind], kind)
    text = style.task_label(kind, int(fields.stage[task]), int(fields.microbatch[task]), which)
    return Cell("-" * len(text) if goes_on else text, kind)


def _legend(timeline: Timeline, view: View, bars: Bars, which: str, slice_s: float, hidden: int) -> list[str]:
    number = {"stage": "layer or stage", "microbatch": "micro-batch", "both": "micro-batch, stage in front"}
    there = [KINDS[i] for i in np.unique(bars.fields.kind)]
    kinds = "  ".join(f"{style.SHORT[kind]} {_MEANING[kind]}" for kind in there)
    lines = [
        f"{kinds}  {_IDLE} idle" + ("" if which == "kind" else f"  - goes on; numbers: {number[which]}"),
        f"a column is {style.time_text(slice_s)}; makespan {style.time_text(timeline.makespan_s)}, "
        f"bubble {timeline.bubble_fraction:.1%}",
    ]
    if hidden:
        lines.append(f"{hidden:,} tasks are too short to be seen at this width")
    return [*lines, view.note] if view.note else lines
