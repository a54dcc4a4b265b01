"""What ``report.pipeline`` says: which layer went where, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from tf_ooo.costs.table import CostTable
from tf_ooo.fit.reporting import fill_distributed_plan
from tf_ooo.modes.pipeline.checks import notes_of
from tf_ooo.modes.pipeline.partition import crossing_bytes
from tf_ooo.modes.pipeline.planning import Planned
from tf_ooo.planning.model.relation import stage_inputs
from tf_ooo.report.report import Report, seconds_text
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.unrolled_tasks import Step

_LOG = logging.getLogger("tf_ooo")
_SECONDS = {"F": "forward_s", "dO": "output_grad_s", "dW": "weight_grad_s", "U": "update_s"}


def fill_report(
    report: Report, planned: Planned, step: Step, costs: CostTable, devices: Sequence[str]
) -> None:
    """Copies the plan into the report."""
    fill_distributed_plan(report, step.known.graph, planned.schedule, planned.timeline, costs)
    report.predicted_step_s = planned.makespan_s
    for row, stage in zip(report.layers, planned.stage_of_layer, strict=True):
        row["stage"] = stage
        row["device"] = devices[planned.device_of_stage[stage]]
    report.pipeline = pipeline_rows(planned, costs, devices)
    report.pipeline["microbatches"] = step.count


def fill_report_of_graph(report: Report, result: RewriteResult) -> None:
    """What was done to the graph that runs."""
    report.rewritten_graph = result.graph_def
    report.moved_ops, report.added_edges = result.moved_ops, result.added_edges
    report.notes += [note for note in result.notes if note not in report.notes]


def pipeline_rows(planned: Planned, costs: CostTable, devices: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON types."""
    stages = planned.stages
    count = planned.schedule.microbatches
    serial_s = sum(
        count * (x.forward_s + x.output_grad_s + x.weight_grad_s) + x.update_s for x in costs.layers
    )
    return {
        "devices": list(devices),
        "stages": [_stage_row(planned, stage, costs, devices) for stage in range(len(stages))],
        "candidates": [dict(row) for row in planned.candidates],
        "predicted_step_s": planned.makespan_s,
        "predicted_bubble_fraction": float(planned.timeline.bubble_fraction),
        "predicted_peak_bytes": [int(size) for size in planned.timeline.peak_bytes],
        "serial_step_s": serial_s,
        "link": {
            "latency_s": costs.link.latency_s,
            "bytes_per_s": None if costs.link.bytes_per_s == float("inf") else costs.link.bytes_per_s,
            "overhead_s_per_byte": costs.link.overhead_s_per_byte,
        },
        "step_s": [],
    }


def _stage_row(planned: Planned, stage: int, costs: CostTable, devices: Sequence[str]) -> dict[str, Any]:
    first, last = planned.bounds[stage]
    own = planned.stages[stage]
    inputs = stage_inputs(planned.schedule, planned.stages, len(planned.stages))
    sends = {str(to): size for to, read in enumerate(inputs) for source, size in read if source == stage}
    return {
        "stage": stage,
        "device": devices[planned.device_of_stage[stage]],
        "layers": [layer.name for layer in costs.layers[first : last + 1]],
        "seconds": {kind: getattr(own, attribute) for kind, attribute in _SECONDS.items()},
        "weight_bytes": own.weight_bytes,
        "slot_bytes": own.slot_bytes,
        "activation_bytes": own.activation_bytes,
        "sends": sends,
        "why": _why(planned, stage, costs),
    }


def _why(planned: Planned, stage: int, costs: CostTable) -> str:
    """Its share of the seconds, and what cutting one layer earlier or later would mean."""

    def busy_s(layers: Iterable[Any]) -> float:
        return float(sum(x.forward_s + x.output_grad_s + x.weight_grad_s for x in layers))

    first, last = planned.bounds[stage]
    mine, all_s = busy_s(costs.layers[first : last + 1]), busy_s(costs.layers)
    fair = all_s / len(planned.bounds)
    text = f"{seconds_text(mine)} of F + dO + dW a micro-batch, an equal share would be {seconds_text(fair)}"
    if last + 1 < len(costs.layers):
        sent = crossing_bytes(costs.layers, last)
        text += f"; {sent / 1e3:.1f} kB cross the cut behind it"
    largest = max(costs.layers[first : last + 1], key=lambda x: busy_s([x]))
    if busy_s([largest]) > 1.2 * fair:
        text += f"; {largest.name} alone takes {seconds_text(busy_s([largest]))}, and is not cut further"
    return text


def note_micro_batches(report: Report, model: Any) -> None:
    """What micro-batches change, said once."""
    for text in notes_of(model):
        if text not in report.notes:
            report.notes.append(text)
            _LOG.info("%s", text)
