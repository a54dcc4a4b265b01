"""What ``report.layerpipe`` says: which task went where, how late gradients are, what versions cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grappler_passes.graph.node_input import split_input
from tf_ooo.costs.table import CostTable
from tf_ooo.fit.reporting import fill_distributed_plan
from tf_ooo.modes.layerpipe.spread import Spread
from tf_ooo.modes.layerpipe.stages import HIGH, Stages
from tf_ooo.modes.layerpipe.versions import from_weights
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.report.report import Report

_HIGH_PROCESSOR = "dO_high_processor"
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
    fill_distributed_plan(report, graph, schedule, timeline, costs)
    report.predicted_step_s = float(timeline.steady_step_s)
    every = schedule.update_every
    _fill_rows(report, stages)
    for layer, row in enumerate(report.layers):
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
        "ways_bytes": _ways_bytes(costs, stages, every),
        "step_s": [],
    }


def _fill_rows(report: Report, stages: Stages) -> None:
    """On which processors the tasks of each layer are."""
    for layer, row in enumerate(report.layers):
        row |= {f"{kind}_processor": stages.of[kind, layer] for kind in ("F", "dO", "dW")}
        row.pop(_HIGH_PROCESSOR, None)
        if layer in stages.shares:
            row[_HIGH_PROCESSOR] = stages.of[HIGH, layer]


def _ways_bytes(costs: CostTable, stages: Stages, every: int = 1) -> dict[str, float]:
    """About what earlier weights take with each ``weights=``: those that dO multiplies with.

    With one update for ``every`` several batches there is one way: the version before the newest.
    """
    if every > 1:
        return {"second": sum(layer.weight_bytes for layer in costs.layers)}
    layers = [(n, layer.weight_bytes) for n, layer in enumerate(costs.layers) if layer.output_grad_s > 0]
    copies = {n: _stashed(stages, n) for n, _ in layers}
    late = sum(size for n, size in layers if copies[n])
    return {"stash": sum(size * copies[n] for n, size in layers), "ema": late, "latest": 0}


def _stashed(stages: Stages, layer: int) -> int:
    """Versions of a layer's weights that wait for dO, on each of its processors, but for one that is sent."""
    of, home = stages.of, stages.of["dW", layer]
    processors = {of[kind, layer] for kind in ("dO", HIGH) if kind == "dO" or layer in stages.shares}
    behind = (stages.backward_round_on(at) - stages.read_round(layer) - (at != home) for at in processors)
    return sum(max(0, rounds) for rounds in behind)


def fill_spread(report: Report, made: Spread) -> None:
    """What was made of the step: measured on its graph, not planned."""
    traced, rounds, stages = made.traced, made.rounds, made.stages
    _fill_rows(report, stages)
    if report.costs is not None:
        every = report.layerpipe["update_every"]
        report.layerpipe["ways_bytes"] = _ways_bytes(report.costs, stages, every)
    variables = {variable.handle: variable.name for variable in traced.graph.variables}
    late = {variables[handle]: late for handle, late in rounds.delay_steps.items()}
    versions = made.ticks.versions
    if versions is None:
        report.layerpipe["delay_steps"] = late
    else:
        behind = versions.delay_updates
        report.layerpipe["delay_updates"] = {variables[handle]: count for handle, count in behind.items()}
        report.layerpipe["gradient_sum_bytes"] = versions.sum_bytes
    report.layerpipe |= {
        "divided": {str(layer): share for layer, (share, _) in stages.shares.items()},
        "rounds": rounds.last + 1,
        "registers": sum(register.depth for register in made.delays.registers),
        "weight_version_bytes": version_bytes(made),
    }


def version_bytes(made: Spread) -> dict[str, int]:
    """Bytes of earlier weights in registers, of averages, second versions, frozen copies; of weights sent."""
    traced = made.traced
    stash = sent = 0
    of_weights, later = from_weights(traced, made.rounds.delay_steps), {one.name for one in made.ticks.now}
    for register in made.delays.registers:
        producer, port = split_input(register.source)
        read = producer in of_weights and traced.index.ops[traced.index.index[producer]] in _VERSIONS
        info = traced.outputs[producer][port]
        if not (read or producer in later) or None in (info.shape or (None,)):
            continue
        away = register.depth if producer in later else register.device != made.rounds.device_of.get(producer)
        each = info.element_bytes * math.prod(info.shape)
        stash, sent = stash + (register.depth - away) * each, sent + away * each
    found = {"stash": stash, "ema": made.ticks.average_bytes}
    if sent:
        found["sent"] = sent
    if made.ticks.versions is not None:
        found["second"] = made.ticks.versions.version_bytes
    if made.ticks.copies.bytes:
        found["frozen"] = made.ticks.copies.bytes
    return found
