"""Shows the report as an HTML page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.pictures.page import Listed, Page, Table, bars_of, chart_of, layer_table, page_html
from tf_ooo.report.sections import CandidateRow, device_text
from tf_ooo.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from tf_ooo.report.report import Report
    from tf_ooo.report.sections import LayerRow

_BAR_HEIGHT, _ROW_WIDTH = 24, 900
# A box takes so many pixels per character of its label at 11 px, and so many beside the label.
_CHARACTER_WIDTH, _PADDING, _GAP = 6.6, 8, 3
_MOST_NOTES = 20
_MOST_CANDIDATES = 30
# Rows of the summary that tables of the page say better.
_IN_TABLES = ("ops per kind", "layers")
_KIND_NAMES = {
    "F": "forward",
    "dO": "output gradient (critical chain)",
    "dW": "weight gradient",
    "U": "weight update",
    "comm": "communication",
    "other": "beside the training step",
}


def render(report: Report) -> str:
    """Return the page's HTML."""
    planned, ours, chart = report.planned, _ours(report), None
    if report.timeline is not None:
        limits_bytes = report.memory_limits_bytes
        chart = chart_of(report.timeline, report.measured_timeline, report.layer_names, limits_bytes)
    kinds = {task.kind: None for tasks in (planned.lanes.values() if planned else ()) for task in tasks}
    samples = {**report.baselines_s, ours: report.steps_s}
    medians_s = {name: statistics.median(times_s) for name, times_s in samples.items() if times_s}
    page = Page(
        "Out-of-order backprop report",
        report.headline,
        report.mood,
        bars=bars_of(medians_s if len(medians_s) > 1 else {}, ours),  # a single one is in the headline
        bars_title="Time of a step, medians of those that were measured",
        chart=chart,
        drawn=_drawn(report),
        lanes=() if chart else lane_pictures(planned, report.layer_names),
        lane_kinds=list(kinds),
        sections=list(_sections(report)),
    )
    return page_html(page)


def _sections(report: Report) -> Iterator[Table | Listed]:
    yield Table("Summary", (), [row for row in report.rows()[1:] if row[0] not in _IN_TABLES])
    left_out = len(report.notes) - _MOST_NOTES
    more = f"and {left_out} more, in report.notes" if left_out > 0 else ""
    yield Listed("Notes", report.notes[:_MOST_NOTES], more)
    yield _candidates(report)
    yield _layers(report)
    kinds = [(kind, _KIND_NAMES.get(kind, kind), str(count)) for kind, count in report.ops.items() if count]
    yield Table("Ops per kind", ("kind", "what it is", "ops"), kinds, {2})
    header = ("op", "reason")
    yield Table("Ops that compute dO and dW together", header, list(report.mixed.items()))
    yield Table("Unclassified ops of the backward pass", header, list(report.unclassified.items()))


def _drawn(report: Report) -> str:
    """Say what the chart shows."""
    timeline, measured = report.timeline, report.measured_timeline is not None
    if timeline is None:
        return ""
    if timeline.schedule.asynchronous and measured:
        return "One round, planned and measured (with the profiler): each task is another batch's"
    if timeline.schedule.asynchronous:
        return f"{timeline.schedule.microbatches} batches, as planned"
    if measured and report.fell_back:
        return "One step: planned, which does not run, and the stock order as measured (with the profiler)"
    how = ", one op after the other" if report.mode == "single_device" else ""
    if measured:
        return f"One step, planned{how and how + ','} and measured (with the profiler)"
    return f"{timeline.steps} steps, as planned" if timeline.steps > 1 else f"One step, as planned{how}"


def _candidates(report: Report) -> Table:
    """List the candidates for a pipeline's plan, the best first, refused ones last."""
    pipeline = report.pipeline
    best: dict[tuple[str, int], CandidateRow] = {}  # of each only the best way to cut the model
    runs = _running(report)
    for row in sorted([*pipeline.candidates, *runs], key=lambda row: row.predicted_step_s or float("inf")):
        best.setdefault((row.schedule, row.stages), row)
    rows = list(best.values())
    kept = runs[0].schedule if runs else report.schedule, len(pipeline.stages)
    taken = next((i for i, row in enumerate(rows) if (row.schedule, row.stages) == kept), None)
    header = ("schedule", "stages", "predicted step", "peak of a device")
    cells = []
    for row in rows[:_MOST_CANDIDATES]:
        figures = [seconds_text(row.predicted_step_s), bytes_text(row.peak_bytes)]
        cells.append([row.schedule, str(row.stages), *([row.reason] if row.reason else figures)])
    return Table("Schedules compared", header, cells, {1, 2, 3}, taken)


def _running(report: Report) -> list[CandidateRow]:
    """Return the running plan if it is none of the candidates: these are later ones, which were slower."""
    pipeline, step_s = report.pipeline, report.pipeline.predicted_step_s
    same = {(row.schedule, row.predicted_step_s) for row in pipeline.candidates}
    is_new = same and step_s and (report.schedule, step_s) not in same
    if report.fell_back or pipeline.replicas > 1 or not is_new:
        return []
    peak_bytes = max(pipeline.predicted_peak_bytes, default=None)
    name = f"{report.schedule}, the plan that runs"
    return [CandidateRow(name, len(pipeline.stages), step_s, peak_bytes)]


def _layers(report: Report) -> Table:
    """Make the table of layers with their seconds, if known; else with the ops of each."""
    rows, costs = report.layers, report.costs
    if costs is not None and len(costs.layers) == len(rows):
        places = [_place(row) for row in rows] if report.pipeline else ()
        return layer_table(costs.layers, places, "micro-batch" if report.pipeline else "batch")
    comm, own = any(row.comm for row in rows), any(row.own_dO for row in rows)
    header = ["layer", "weights", "dW ops", "U ops"]
    header += (["comm ops"] if comm else []) + (["dO of its own"] if own else [])
    cells = []
    for row in rows:
        counts = [row.dW, row.U, *([row.comm] if comm else [])]
        has_own = ["yes" if row.own_dO else "no"] if own else []
        cells.append([str(row.index), row.name, *map(str, counts), *has_own])
    return Table("Layers", header, cells, {0, 2, 3, 4} if comm else {0, 2, 3})


def _place(row: LayerRow) -> str:
    return "" if row.stage is None else f"{row.stage}, {device_text(row.device or '')}"


def _ours(report: Report) -> str:
    devices = (report.pipeline or report.layerpipe).devices
    return f"{report.schedule} on {len(devices)} devices" if devices else "reordered"


def lane_pictures(schedule: Schedule | None, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Draw for each stream the boxes of its tasks in order, wrapped into rows; a box holds its label."""
    pictures = []
    for (device, stream), tasks in (schedule.lanes if schedule else {}).items():
        labels = [str(task) for task in tasks]
        width = int(max(map(len, labels), default=0) * _CHARACTER_WIDTH + _PADDING + _GAP)
        per_row, row_height = max(1, _ROW_WIDTH // width), _BAR_HEIGHT + 6
        boxes = []
        for place, (task, label) in enumerate(zip(tasks, labels, strict=True)):
            corner = {"x": (place % per_row) * width, "y": (place // per_row) * row_height}
            boxes.append({**corner, "kind": task.kind, "layer": names.get(task.stage, ""), "text": label})
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
