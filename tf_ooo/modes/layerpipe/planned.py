"""The plan of a model that is spread over devices; stays for the fits of one model."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from tf_ooo.compat import keras_layers, keras_optimizers
from tf_ooo.costs.table import CostTable
from tf_ooo.modes.layerpipe.choice import make_plan
from tf_ooo.modes.layerpipe.divide import lower_shares
from tf_ooo.modes.layerpipe.options import LayerPipe
from tf_ooo.modes.layerpipe.reporting import fill_report
from tf_ooo.modes.layerpipe.stages import stages_of
from tf_ooo.modes.layerpipe.traced import Traced, renumbered
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.report import Report
from tf_ooo.rewriting.naming import variable_layers
from tf_ooo.rewriting.unrolled_tasks import Step
from tf_ooo.tracing.optimizers import optimizers_of

_LOG = logging.getLogger("tf_ooo")
# Batches of the plan, for each processor: enough for the rounds at both ends not to matter.
_BATCHES = 4
_TIMED = 100


class SpreadPlan:
    """Which task runs where.

    Args:
        step: whose layers are spread.
        costs: of the layers, with the link.
        schedule: one was made for them.

    Attributes:
        stages: where the tasks of its layers run.
        layers: the variables of each, as the stages number them.
        home: the processor of each variable, by its name in graphs: of weights and their slots that of dW, of
            states that of F.
        step_s: seconds of the rounds in which nothing was traced, the last hundred.
    """

    def __init__(self, step: Step, costs: CostTable, schedule: Schedule) -> None:
        graph = step.known.graph
        self.costs, self.stages = costs, stages_of(schedule, len(costs.layers))
        self.layers: list[Collection[str]] = layers_of(step)
        self.step_s = deque[float](maxlen=_TIMED)
        trained = {name for variable in graph.variables for name in (variable.name, *variable.slots)}
        self.home = {
            name: self.stages.of["dW" if name in trained else "F", layer]
            for name, layer in variable_layers(step).items()
        }


def layers_of(step: Step) -> list[Collection[str]]:
    """The variables of each layer."""
    return [set(layer.variables) for layer in step.known.graph.layers]


def plan_spread(
    step: Step,
    costs: CostTable,
    traced: Traced,
    devices: Sequence[str],
    group: int | None,
    options: LayerPipe,
    report: Report,
) -> SpreadPlan:
    """Plans, and says so in the report.

    Args:
        step: taken apart.
        costs: of its layers, with the link.
        traced: the step as it is before the plan: what can be divided.
        devices: full names.
        group: so many batches are one update; None: one is.
        options: ``schedule``.
        report: to fill in.
    """
    options_of_policies = {
        "lower_shares": lower_shares(renumbered(traced, layers_of(step)), costs.op_seconds),
        "accumulate_steps": group,
    }
    plan = make_plan(
        options.schedule,
        costs.layers,
        costs.link,
        len(devices),
        _BATCHES * (group or len(devices)),
        {name: value for name, value in options_of_policies.items() if value is not None},
    )
    spread = SpreadPlan(step, costs, plan.schedule)
    fill_report(report, step.known.graph, plan, costs, spread.stages, devices)
    return spread


def note_rebuilt_weights(report: Report, model: Any) -> None:
    """What ``weights="ema"`` cannot know."""
    notes = [
        f"weights='ema': earlier weights are rebuilt from the updates that {type(optimizer).__name__} made, "
        "which change from step to step; weights='stash' is exact"
        for optimizer in optimizers_of(model)
        if not keras_optimizers.is_plain_sgd(optimizer)
    ]
    names = keras_layers.batch_normalizations(model)
    if names:
        notes.append(
            f"weights='ema': {len(names)} BatchNormalization layers, {names[0]} first, use the "
            "statistics of their forward pass with rebuilt weights"
        )
    for note in notes:
        _LOG.warning("%s", note)
    report.notes += [note for note in notes if note not in report.notes]
