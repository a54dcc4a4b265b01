"""Fills a report with what a graph, a plan and measured steps tell."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tf_ooo.report.report import Report
from tf_ooo.report.sections import LayerRow

if TYPE_CHECKING:
    from grappler_passes.graph.training_graph import TrainingGraph
    from tf_ooo.costs.table import CostTable
    from tf_ooo.planning.choosing.plan import Plan


def layer_rows_of(graph: TrainingGraph) -> list[LayerRow]:
    """Return one row per layer: index, name, ops of dW, U and communication."""
    rows = []
    for layer in graph.layers:
        counts = len(layer.weight_grad_ops), len(layer.update_ops), len(layer.communication_ops)
        rows.append(LayerRow(layer.index, layer.name, *counts))
    return rows


def fill_plan(report: Report, graph: TrainingGraph, plan: Plan, costs: CostTable) -> None:
    """The graph's tasks, the schedule, its seconds and bytes."""
    report.ops, report.unclassified = graph.counts(), dict(graph.unclassified)
    report.mixed = dict(graph.mixed)
    report.planned, report.schedule, report.timeline = plan.schedule, plan.schedule.policy, plan.timeline
    report.predicted_peak_bytes = plan.trial.peak_bytes
    report.notes += [note for note in (plan.why, *costs.notes) if note and note not in report.notes]
    report.layers = layer_rows_of(graph)
    report.kept_because = "distributed as asked"


def fill_step_times(report: Report, step_s: Iterable[float]) -> None:
    """The measured steps."""
    times = list(step_s)
    if not times:
        return
    report.measured_step_s, report.steps_s = statistics.median(times), times
    report.step_noise_s = statistics.median(abs(t - report.measured_step_s) for t in times)
    (report.layerpipe or report.pipeline).step_s = times
