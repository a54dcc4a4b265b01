"""The report as a page, built as that of a timeline by itself."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_ooo.errors import BackendError
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.pictures.page import Chart, chart_of, filled
from tf_ooo.planning.pictures.style import COLOURS, TEXT_COLOURS, bytes_text
from tf_ooo.report.texts import seconds_text

if TYPE_CHECKING:
    from tf_ooo.report.report import Report

_LOG = logging.getLogger("tf_ooo")
_BAR_HEIGHT, _ROW_WIDTH = 24, 900
# Of a box: pixels per character of its label at 11 px, and beside the label.
_CHARACTER_WIDTH, _PADDING, _GAP = 6.6, 8, 3
_MOST_NOTES = 20
_MOST_CANDIDATES = 30
OURS = "reordered"
_KIND_NAMES = {
    "F": "forward",
    "dO": "output gradient (critical chain)",
    "dW": "weight gradient",
    "U": "weight update",
    "comm": "communication",
    "other": "beside the training step",
}


def render(report: Report) -> str:
    """The page's HTML; without a chart where plotly is not installed."""
    return filled(
        "report.html",
        Path(__file__).parent / "templates",
        report=report,
        colours=COLOURS,
        text_colours=TEXT_COLOURS,
        rows=report.rows(),
        kinds=[(kind, _KIND_NAMES.get(kind, kind), count) for kind, count in report.ops.items()],
        steps=step_bars(report),
        ours=OURS,
        most_notes=_MOST_NOTES,
        chart=_chart(report),
        drawn=_drawn(report),
        lanes=lane_pictures(report.planned),
        candidates=list(_candidates(report)),
        layer_names=_layer_names(report),
    )


def _chart(report: Report) -> Chart | None:
    if report.timeline is None:
        return None
    try:
        return chart_of(
            report.timeline, report.measured_timeline, _layer_names(report), report.memory_limit_bytes
        )
    except BackendError as error:  # plotly is not installed
        _LOG.warning("the report's page has no chart: %s", error)
        return None


def _drawn(report: Report) -> str:
    """What the chart shows: late gradients have a plan of several batches, and one round is measured."""
    schedule, measured = report.planned, report.measured_timeline is not None
    if schedule is not None and schedule.asynchronous:
        planned = f"{schedule.microbatches} batches as planned"
        return f"{planned}, one round as measured" if measured else planned
    return "One step, planned and measured" if measured else "One step, as planned"


def _layer_names(report: Report) -> dict[int, str]:
    return {row.index: row.name for row in report.layers}


def _candidates(report: Report) -> Iterator[dict[str, Any]]:
    """What a pipeline's plan was chosen from, the best first, refused ones last."""
    rows = sorted(report.pipeline.candidates, key=lambda row: row.predicted_step_s or float("inf"))
    kept = (report.schedule, len(report.pipeline.stages))
    taken = next((row for row in rows if (row.schedule, row.stages) == kept), None)
    for row in rows[:_MOST_CANDIDATES]:
        yield {
            "schedule": row.schedule,
            "stages": row.stages,
            "taken": row is taken,
            "step": seconds_text(row.predicted_step_s),
            "peak": bytes_text(row.peak_bytes),
            "reason": row.reason or "",
        }


def table(report: Report) -> str:
    """What a notebook shows: what was gained, and the rows of the summary."""
    import html

    (_, headline), *rows = report.rows()
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(what)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for what, value in rows
    )
    return f"<p><b>{html.escape(headline)}</b></p><table>{cells}</table>"


def step_bars(report: Report) -> list[dict[str, Any]]:
    """One bar for each baseline and one for the steps as they run, as percent of the longest."""
    samples = {**report.baselines_s, OURS: report.steps_s}
    times = {name: statistics.median(times_s) for name, times_s in samples.items() if times_s}
    longest = max(times.values(), default=0.0)
    return [
        {"name": name, "text": seconds_text(seconds), "percent": 100 * seconds / longest}
        for name, seconds in times.items()
    ]


def lane_pictures(schedule: Schedule | None) -> list[dict[str, Any]]:
    """For each stream the boxes of its tasks in order, wrapped into rows; a box holds its label."""
    pictures = []
    for (device, stream), tasks in (schedule.lanes if schedule else {}).items():
        labels = [str(task) for task in tasks]
        width = int(max(map(len, labels), default=0) * _CHARACTER_WIDTH + _PADDING + _GAP)
        per_row, row_height = max(1, _ROW_WIDTH // width), _BAR_HEIGHT + 6
        boxes = []
        for place, (task, label) in enumerate(zip(tasks, labels, strict=True)):
            corner = {"x": (place % per_row) * width, "y": (place // per_row) * row_height}
            boxes.append({**corner, "kind": task.kind, "layer": task.stage, "text": label})
        pictures.append(
            {
                "title": f"device {device}, stream {stream}",
                "boxes": boxes,
                "width": min(len(tasks), per_row) * width,
                "height": -(-len(tasks) // per_row) * row_height,
                "box_width": width - _GAP,
                "box_height": _BAR_HEIGHT,
            }
        )
    return pictures
