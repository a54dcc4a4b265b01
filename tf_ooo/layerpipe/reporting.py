"""What ``report.layerpipe`` says: which task went where, how late gradients are, what versions cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grappler_passes.node_input import split_input
from tf_ooo.costs.table import CostTable
from tf_ooo.layerpipe.spread import Spread
from tf_ooo.layerpipe.stages import HIGH, Stages
from tf_ooo.layerpipe.versions import from_weights
from tf_ooo.pipeline.reporting import fill_plan
from tf_ooo.report import Report
from tf_ooo.schedule import Schedule
from tf_ooo.timeline import Timeline

# How a backward pass gets the weights of its forward pass: as they were read, or cast (mixed precision).
_VERSIONS = ("ReadVariableOp", "Cast")
# Measured: docs/layerpipe.md.
_ON_DIGITS = (
    "on digits (examples/05_layerpipe.py, gradients up to 4 steps late) test accuracy ended up to 0.4 "
    "points lower in the worst of three runs, with a falling learning rate and with a constant one"
)
_TWO_VERSIONS = (
    "the gradients of {every} batches are one update, which is one update late: the result of training is "
    "not that of synchronous training; on digits (docs/layerpipe.md) the test accuracy was 0.2 to 1.3 points "
    "lower at the same learning rate"
)
_CHANGES = (
    "gradients are applied up to {delay} steps after their forward pass: the result of training is not that "
    f"of synchronous training; {_ON_DIGITS}"
)


def fill_report(
    report: Report,
    graph: Any,
    schedule: Schedule,
    timeline: Timeline,
    costs: CostTable,
    stages: Stages,
    devices: Sequence[str],
) -> None:
    """Copies the plan into the report."""
    fill_plan(report, graph, schedule, timeline, costs)
    report.predicted_step_s = float(timeline.steady_step_s)
    every = schedule.update_every
    for layer, row in enumerate(report.layers):
        row |= {f"{kind}_processor": stages.of[kind, layer] for kind in ("F", "dO", "dW")}
        if (HIGH, layer) in stages.of:
            row["dO_high_processor"] = stages.of[HIGH, layer]
        row |= {"stages_after": stages.stages_after(layer)}
        row |= {"delay_updates": 1} if every > 1 else {"delay_steps": stages.delay_steps(layer)}
    delay = max((row.get("delay_steps", 0) for row in report.layers), default=0)
    if every > 1:
        report.notes.append(_TWO_VERSIONS.format(every=every))
    if delay:
        report.notes.append(_CHANGES.format(delay=delay))
    report.layerpipe = {
        "devices": list(devices),
        "predicted_step_s": float(timeline.steady_step_s),
        "serial_step_s": sum(
            x.forward_s + x.output_grad_s + x.weight_grad_s + x.update_s for x in costs.layers
        ),
        "update_every": every,
        "divided": {str(layer): share for layer, (share, _) in stages.shares.items()},
        "ways_bytes": _ways_bytes(costs, stages) if every == 1 else {},
        "step_s": [],
    }


def _ways_bytes(costs: CostTable, stages: Stages) -> dict[str, float]:
    """About what earlier weights take with each ``weights=``: those that dO multiplies with."""
    layers = [(n, layer.weight_bytes) for n, layer in enumerate(costs.layers) if layer.output_grad_s > 0]
    copies = {n: _stashed(stages, n) for n, _ in layers}
    late = sum(size for n, size in layers if copies[n])
    return {"stash": sum(size * copies[n] for n, size in layers), "ema": late, "latest": 0}


def _stashed(stages: Stages, layer: int) -> int:
    """Versions of a layer's weights that wait for dO, on each of its processors, but for one that is sent."""
    of, home = stages.of, stages.of["dW", layer]
    processors = {of[kind, layer] for kind in ("dO", HIGH) if (kind, layer) in of}
    behind = (stages.backward_round_on(at) - stages.read_round(layer) - (at != home) for at in processors)
    return sum(max(0, rounds) for rounds in behind)


def fill_spread(report: Report, made: Spread) -> None:
    """What was made of the step: measured on its graph, not planned."""
    traced, rounds = made.traced, made.rounds
    variables = {variable.handle: variable.name for variable in traced.graph.variables}
    late = {variables[handle]: late for handle, late in rounds.delay_steps.items()}
    versions = made.ticks.versions
    if versions is None:
        report.layerpipe["delay_steps"] = late
    else:
        behind = versions.delay_updates
        report.layerpipe["delay_updates"] = {variables[handle]: count for handle, count in behind.items()}
        report.layerpipe["gradient_sum_bytes"] = versions.sum_bytes
    report.layerpipe["divided"] = {
        layer: share for layer, share in report.layerpipe["divided"].items() if int(layer) in made.divided
    }
    report.layerpipe |= {
        "rounds": rounds.last + 1,
        "registers": sum(register.depth for register in made.delays.registers),
        "weight_version_bytes": version_bytes(made),
    }


def version_bytes(made: Spread) -> dict[str, int]:
    """Bytes of earlier weights in registers (not sent), averages, second versions; of frozen copies."""
    traced = made.traced
    stash, of_weights = 0, from_weights(traced, made.rounds.delay_steps)
    for register in made.delays.registers:
        producer, port = split_input(register.source)
        if producer in of_weights and traced.index.ops[traced.index.index[producer]] in _VERSIONS:
            info = traced.outputs[producer][port]
            if None not in (info.shape or (None,)):
                sent = register.device != made.rounds.device_of.get(producer)
                stash += (register.depth - sent) * info.element_bytes * math.prod(info.shape)
    found = {"stash": stash, "ema": made.ticks.average_bytes}
    if made.ticks.versions is not None:
        found["second"] = made.ticks.versions.version_bytes
    if made.ticks.copies.bytes:
        found["frozen"] = made.ticks.copies.bytes
    return found
