"""Fills ``report.layerpipe``: where tasks run, how late gradients are, how large weight versions are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from grappler_passes.compat.graph_protos import split_input
from grappler_passes.graph.training_graph import TrainingGraph
from tf_ooo.costs.table import CostTable
from tf_ooo.fit.recorder import Watched
from tf_ooo.modes.layerpipe.rounds import HIGH, Stages
from tf_ooo.modes.layerpipe.spread import Spread, SpreadPlan
from tf_ooo.modes.layerpipe.versions import from_weights
from tf_ooo.planning.choosing.plan import Plan
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.report.parts import Outcome, PlannedStep, StepOps
from tf_ooo.report.report import Report
from tf_ooo.report.sections import LayerPipeSection, LayerRow, LinkRow
from tf_ooo.rewriting.lowering import timed_ops
from tf_ooo.tracing.variables import bytes_of

# A backward pass gets the weights of its forward pass like this: as they were read, or cast.
_VERSIONS = ("ReadVariableOp", "Cast")
_KINDS = ("F", "dO", "dW", "U")
# Measured: docs/layerpipe.md.
_ON_DIGITS = (
    "on digits (examples/05_layerpipe.py, gradients up to 4 steps late) test accuracy ended up to 0.4 "
    "points lower in the worst of three runs, with a falling learning rate and with a constant one"
)
_CHANGES = (
    "gradients are applied up to {delay} steps after their forward pass: the result of training is not that "
    f"of synchronous training; {_ON_DIGITS}"
)


def fill_report(
    report: Report, graph: TrainingGraph, plan: Plan, costs: CostTable, stages: Stages, devices: Sequence[str]
) -> None:
    """Copy the plan into the report."""
    layers, step_s = placed_rows(map(LayerRow.of, graph.layers), stages), float(plan.timeline.steady_step_s)
    section = LayerPipeSection(
        devices=list(devices),
        predicted_step_s=step_s,
        serial_step_s=sum(layer.busy_s + layer.update_s for layer in costs.layers),
        link=LinkRow.of(costs.link),
        speeds=list(costs.link.speeds),
        divided={layer: share for layer, (share, _) in stages.shares.items()},
        ways_bytes=_ways_bytes(costs, stages),
    )
    report.put(
        Outcome(kept_because="distributed as asked"),
        StepOps.of(graph, layers),
        PlannedStep(plan.schedule, plan.timeline, costs, step_s, limits_of(plan, costs)),
    )
    report.change(layerpipe=section, predicted_peak_bytes=plan.trial.peak_bytes)
    report.note(plan.why, *costs.notes)
    if delay := max((row.delay_steps or 0 for row in layers), default=0):
        report.note(_CHANGES.format(delay=delay))


def limits_of(plan: Plan, costs: CostTable) -> list[str]:
    """Say how the predicted step spends time other than with all devices at work."""
    step_s, problem = float(plan.timeline.steady_step_s), plan.problem
    if not step_s:
        return []
    link = problem.link
    unlinked_s, apart_s = (
        simulate(plan.schedule, problem.layers, other).steady_step_s
        for other in (link.free, dataclasses.replace(link, machines=()))
    )
    largest_s, largest = max((layer.busy_s, layer.name) for layer in costs.layers)
    return [
        # On devices that share cores each task takes longer, which is no waiting.
        f"devices that wait {plan.timeline.steady_bubble_fraction:.0%}",
        f"link {max(0.0, 1 - unlinked_s / step_s):.0%}",
        *([f"devices that share {link.cores} cores {1 - apart_s / step_s:.0%}"] if apart_s < step_s else []),
        f"the largest layer, {largest}, {largest_s / step_s:.0%} of the step",
    ]


def placed_rows(rows: Iterable[LayerRow], stages: Stages) -> list[LayerRow]:
    """Return the rows with the processors of each layer's tasks, and how late its gradients are."""
    of = stages.of
    return [
        dataclasses.replace(
            row,
            F_processor=of["F", layer],
            dO_processor=of["dO", layer],
            dW_processor=of["dW", layer],
            dO_high_processor=of[HIGH, layer] if layer in stages.shares else None,
            stages_after=stages.stages_after(layer),
            delay_steps=stages.delay_steps(layer),
        )
        for layer, row in enumerate(rows)
    ]


def _ways_bytes(costs: CostTable, stages: Stages) -> dict[str, float]:
    """Estimate the bytes of earlier weights with each ``weights=``, for those that dO multiplies with."""
    layers = [(n, layer.weight_bytes) for n, layer in enumerate(costs.layers) if layer.output_grad_s > 0]
    copies = {n: _stashed(stages, n) for n, _ in layers}
    late = sum(size for n, size in layers if copies[n])
    return {"stash": sum(size * copies[n] for n, size in layers), "ema": late, "latest": 0}


def _stashed(stages: Stages, layer: int) -> int:
    """Return the versions of a layer's weights that wait for dO on each processor, less a sent one."""
    of, home = stages.of, stages.of["dW", layer]
    processors = {of[kind, layer] for kind in ("dO", HIGH) if kind == "dO" or layer in stages.shares}
    behind = (stages.backward_round_on(at) - stages.read_round(layer) - (at != home) for at in processors)
    return sum(max(0, rounds) for rounds in behind)


def fill_spread(report: Report, spread: Spread) -> None:
    """Report the spread step, from its graph rather than from the plan."""
    traced, rounds, stages, section = spread.traced, spread.rounds, spread.stages, report.layerpipe
    names = {variable.handle: variable.name for variable in traced.graph.variables}
    section = dataclasses.replace(
        section,
        ways_bytes=section.ways_bytes if report.costs is None else _ways_bytes(report.costs, stages),
        delay_steps={names[handle]: steps for handle, steps in rounds.delay_steps.items()},
        divided={layer: share for layer, (share, _) in stages.shares.items()},
        rounds=rounds.last + 1,
        registers=sum(register.depth for register in spread.delays.registers),
        weight_version_bytes=version_bytes(spread),
    )
    report.change(layers=placed_rows(report.layers, stages), layerpipe=section)


def version_bytes(spread: Spread) -> dict[str, int]:
    """Return the bytes of earlier weights in registers, of averages, of frozen copies, of sent weights."""
    traced, weights = spread.traced, spread.ticks.weights
    stash = sent = 0
    of_weights = from_weights(traced, spread.rounds.delay_steps)
    later = {weight.name for weight in weights.placeholders}
    for register in spread.delays.registers:
        producer, port = split_input(register.source)
        read = producer in of_weights and traced.index.ops[traced.index.index[producer]] in _VERSIONS
        info = traced.outputs[producer][port]
        if not (read or producer in later) or None in (info.shape or (None,)):
            continue
        elsewhere = register.device != spread.rounds.device_of.get(producer)
        away = register.depth if producer in later else elsewhere
        each = info.element_bytes * math.prod(size or 0 for size in info.shape or ())
        stash, sent = stash + (register.depth - away) * each, sent + away * each
    optional = {"sent": sent, "frozen": bytes_of(spread.ticks.copies.variables)}
    taken = {what: size for what, size in optional.items() if size}
    return {"stash": stash, "ema": bytes_of(weights.variables), **taken}


def watched_round(plan: SpreadPlan, over_rounds: Spread, planned: Schedule, together: int) -> Watched:
    """Describe the last of the rounds that run as one, or a single round at the end of an epoch.

    Each task is another batch's.
    """
    tasks = _tasks(over_rounds, planned)
    named = tasks | {f"round_{together - 1}/{name}": task for name, task in tasks.items()}
    # Each task once, on its processor: F before dO before dW there, as rounds are ordered.
    lanes = {
        lane: TaskList(sorted({*tasks.values()} & {*own}, key=_place)) for lane, own in planned.lanes.items()
    }
    stages, whole = planned.stages, frozenset(planned.lanes)
    schedule = Schedule(planned.mode, planned.policy, lanes, stages=stages, priority_lanes=whole)
    return Watched(schedule, lambda: named, plan.step_s, late_gradients=True)


def _place(task: Task) -> tuple[int, int]:
    """Return a key that orders forward tasks upwards and backward tasks downwards."""
    return _KINDS.index(task.kind), task.stage if task.kind == "F" else -task.stage


def _tasks(over_rounds: Spread, planned: Schedule) -> dict[str, Task]:
    """Return the task of each op; of the forward pass only ops that show when it ran."""
    traced, stages = over_rounds.traced, range(len(planned.stages))
    stage_of = {layer: stage for stage in stages for layer in planned.layers_of(stage)}
    tasks, there = {}, set(planned.tasks)
    for name, (kind, layer) in traced.where.items():
        stage = stage_of.get(layer, layer)
        high = Task("dO", stage, 0, 1)
        # A part that is no task of the plan belongs to its output gradient.
        tasks[name] = Task(kind, stage) if kind != HIGH else high if high in there else Task("dO", stage)
    timed = timed_ops(traced.graph_def, tasks)
    return {name: task for name, task in timed.items() if name in over_rounds.rounds.of}
