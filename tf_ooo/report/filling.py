"""What modes that spread a model over devices write into a report alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.table import CostTable
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.report.report import Report, layer_rows_of


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
    report.measured_step_s = statistics.median(times)
    report.step_noise_s = statistics.median(abs(t - report.measured_step_s) for t in times)
    (report.layerpipe or report.pipeline).step_s = times
