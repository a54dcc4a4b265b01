"""The pages of ``tf-ooo plan`` and ``tf-ooo simulate``."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.cli.plan_table import CandidateRows
from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.planning.choosing.figures import one_device_s, over, over_one_device
from tf_ooo.planning.choosing.plan import Plan, Trial
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.pictures.page import Listed, Page, Table, bars_of, chart_of, layer_table, title
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.units import time_text

_ONE_DEVICE = "one device, the same work"


def page_of_plan(
    plan: Plan,
    timeline: Timeline,
    rows: CandidateRows,
    layers: Sequence[LayerCosts],
    assumed: Sequence[str],
    notes: Sequence[str],
) -> Page:
    """Build the page of a plan: the choice and its reason, its assumptions, and the picture.

    Args:
        plan, timeline: chosen, and of so many steps as are drawn.
        rows: all that was compared.
        layers: for one micro-batch.
        assumed, notes: sentences.
    """
    schedule = plan.trial.schedule
    return Page(
        f"Plan: {title(timeline)}",
        _headline(plan.trial, rows),
        "back" if _slower(plan.trial) else "plain",
        bars=bars_of(_steps_s(plan.trial, rows), schedule.policy),
        bars_title="Predicted time of a step",
        chart=chart_of(timeline, None, names_of(layers), plan.problem.limits_bytes),
        drawn="As planned",
        sections=[
            Table("Schedules compared", *rows.cells(schedule.policy), wide=True),
            Listed("Assumed", assumed),
            Listed("Notes", notes),
            layer_table(layers, _places(schedule, len(layers)), "micro-batch"),
        ],
    )


def page_of_simulation(timeline: Timeline, layers: Sequence[LayerCosts]) -> Page:
    """A schedule on paper, and the costs of its layers."""
    return Page(
        title(timeline),
        chart=chart_of(timeline, None, names_of(layers)),
        sections=[layer_table(layers, _places(timeline.schedule, len(layers)), "micro-batch")],
    )


def _headline(trial: Trial, rows: CandidateRows) -> str:
    text = f"predicted {time_text(trial.step_s)} a step with {trial.schedule.policy}"
    alone, reference = over_one_device(trial), rows.reference
    if alone is not None and trial.schedule.devices * trial.schedule.workers > 1:
        text += f"; {alone:.2f}x as fast as one device"
    if reference is not None and reference.trial is not None and reference.name != trial.schedule.policy:
        ratio = over(trial, reference.trial)
        text += "" if ratio is None else f", {ratio:.2f}x as fast as {reference.name}"
    return text


def _slower(trial: Trial) -> bool:
    alone = over_one_device(trial)
    return alone is not None and alone < 1


def _steps_s(trial: Trial, rows: CandidateRows) -> dict[str, float]:
    """Return the step times of one device, of the plan's reference, and of the plan."""
    reference, schedule = rows.reference, trial.schedule
    steps_s = {_ONE_DEVICE: one_device_s(schedule, trial.problem.layers)}
    if reference is not None:
        steps_s[reference.name] = reference.step_s
    return {**steps_s, schedule.policy: trial.step_s}


def names_of(layers: Sequence[LayerCosts]) -> dict[int, str]:
    """Return the names of the layers that have one, by number."""
    return {number: layer.name for number, layer in enumerate(layers) if layer.name}


def _places(schedule: Schedule, count: int) -> list[str]:
    """Return each layer's stage and device; empty where its tasks are on several devices, or all on one."""
    if schedule.mode != "pipeline" or schedule.devices == 1:
        return []
    stages = len(schedule.stages) or count
    devices = schedule.device_of_stage
    places = {
        layer: f"{stage}, {devices[stage]}" for stage in range(stages) for layer in schedule.layers_of(stage)
    }
    return [places.get(layer, "") for layer in range(count)]
