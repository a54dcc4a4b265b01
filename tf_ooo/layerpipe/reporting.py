"""What ``report.layerpipe`` says: which task went where, how late gradients are, what versions cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grappler_passes.node_input import split_input
from tf_ooo.costs.table import CostTable
from tf_ooo.layerpipe.spread import Spread
from tf_ooo.layerpipe.stages import Stages
from tf_ooo.report import Report, layer_rows_of
from tf_ooo.timeline import Timeline

_CHANGES = (
    "gradients are applied up to {delay} steps after their forward pass: the result of training is not that "
    "of synchronous training"
)


def fill_report(
    report: Report, graph: Any, stages: Stages, timeline: Timeline, costs: CostTable, devices: Sequence[str]
) -> None:
    """Copies the plan into the report."""
    report.ops, report.unclassified = graph.counts(), dict(graph.unclassified)
    report.mixed = dict(graph.mixed)
    report.schedule = report.planned.policy if report.planned is not None else ""
    report.predicted_step_s = float(timeline.steady_step_s)
    report.predicted_peak_bytes = max(timeline.peak_bytes, default=0)
    report.notes += [note for note in costs.notes if note not in report.notes]
    report.kept_because = "distributed as asked"
    report.layers = layer_rows_of(graph)
    for layer, row in enumerate(report.layers):
        row |= {f"{kind}_processor": stages.of[kind, layer] for kind in ("F", "dO", "dW")}
        row |= {"stages_after": stages.stages_after(layer), "delay_steps": 2 * stages.stages_after(layer)}
    delay = max((row["delay_steps"] for row in report.layers), default=0)
    if delay:
        report.notes.append(_CHANGES.format(delay=delay))
    report.layerpipe = {
        "devices": list(devices),
        "predicted_step_s": float(timeline.steady_step_s),
        "serial_step_s": sum(
            x.forward_s + x.output_grad_s + x.weight_grad_s + x.update_s for x in costs.layers
        ),
        "divided": {str(layer): share for layer, (share, _) in stages.shares.items()},
        "step_s": [],
    }


def fill_spread(report: Report, made: Spread) -> None:
    """What was made of the step: measured on its graph, not planned."""
    traced, rounds = made.traced, made.rounds
    variables = {variable.handle: variable.name for variable in traced.graph.variables}
    report.layerpipe |= {
        "delay_steps": {variables[handle]: late for handle, late in made.delay_steps.items()},
        "rounds": rounds.last + 1,
        "registers": sum(register.depth for register in made.delays.registers),
        "weight_version_bytes": version_bytes(made),
    }


def version_bytes(made: Spread) -> dict[str, int]:
    """Bytes of earlier weights: in registers, but for what is only sent, and of moving averages."""
    traced = made.traced
    stash = 0
    for register in made.delays.registers:
        producer, port = split_input(register.source)
        kind, _ = traced.where.get(producer, ("", 0))
        if kind == "F" and traced.index.ops[traced.index.index[producer]] == "ReadVariableOp":
            info = traced.outputs[producer][port]
            if None not in (info.shape or (None,)):
                sent = register.device != made.rounds.device_of[producer]
                stash += (register.depth - sent) * info.element_bytes * math.prod(info.shape)
    return {"stash": stash, "ema": made.ticks.average_bytes}
