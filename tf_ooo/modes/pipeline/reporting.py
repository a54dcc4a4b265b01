"""Fills ``report.pipeline``: which layer went where, and why."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from tf_ooo.costs.layer_costs import SECONDS, LayerCosts, Link
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import OOOError
from tf_ooo.fit.timing import ONE_DEVICE
from tf_ooo.modes.pipeline.mesh import Mesh, Replicas, counts_of, make_mesh
from tf_ooo.modes.pipeline.options import AUTO
from tf_ooo.modes.pipeline.partition import crossing_bytes
from tf_ooo.modes.pipeline.planning import PlanRequest
from tf_ooo.planning.building.stages import Bounds, stage_of_layer
from tf_ooo.planning.choosing.figures import recomputation
from tf_ooo.planning.choosing.plan import Candidate, Plan
from tf_ooo.planning.model.relation import stage_inputs
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.report.parts import PlannedStep, StepOps
from tf_ooo.report.report import Report
from tf_ooo.report.sections import CandidateRow, LayerRow, LinkRow, PipelineSection, ReplicasRow, StageRow
from tf_ooo.report.summary import Gain
from tf_ooo.rewriting.parts import loops_of_layers
from tf_ooo.rewriting.step_graph import StepGraph
from tf_ooo.units import bytes_text, seconds_text, with_units

_WHOLE_PARTS = (
    "batches are computed in {0} micro-batches, one for each device that trains, instead of {1}: no device "
    "waits for another one's; microbatches= keeps to a number"
)


def fill_report(
    report: Report, mesh: Mesh, step: StepGraph, costs: CostTable, devices: Sequence[str], processes: int = 1
) -> None:
    """Copy the plan into the report; so many ``processes`` have such a pipeline each."""
    costs = costs.scaled(mesh.larger)
    plan, graph, section = mesh.plan, step.graph, section_of(mesh, costs, devices)
    layers = [
        dataclasses.replace(LayerRow.of(layer), stage=stage, device=section.stages[stage].device)
        for layer, stage in zip(graph.layers, stage_of_layer(plan.problem.bounds), strict=True)
    ]
    # So it can be simulated with the report's costs, and run again.
    planned = dataclasses.replace(
        mesh.schedule, recompute=plan.problem.recomputed, workers=mesh.replicas * processes
    )
    timeline = dataclasses.replace(plan.timeline, schedule=mesh.schedule)
    report.put(
        StepOps.of(graph, layers), PlannedStep(planned, timeline, costs, mesh.step_s, limits_of(mesh, costs))
    )
    report.change(pipeline=section, predicted_peak_bytes=mesh.peak_bytes)
    report.note(plan.why, *costs.notes)
    forget_whole_parts(report)
    if mesh.parts:
        report.note(_WHOLE_PARTS.format(mesh.wanted.microbatches, mesh.parts), log=logging.INFO)


def forget_whole_parts(report: Report) -> None:
    """Forget notes on a plan that no longer runs."""
    report.forget(*(note for note in report.notes if note.startswith(_WHOLE_PARTS.partition("{")[0])))


def section_of(mesh: Mesh, costs: CostTable, devices: Sequence[str]) -> PipelineSection:
    """Return the plan's part of a report."""
    plan, chosen = mesh.plan, mesh.chosen
    count, timeline, link = mesh.wanted.microbatches, plan.timeline, costs.link
    again = recomputation(Candidate(plan.schedule.policy, plan.problem, plan.trial))
    return PipelineSection(
        devices=list(devices),
        stages=[_stage_row(plan, stage, costs, devices) for stage in range(len(plan.problem.bounds))],
        candidates=[_candidate_row(candidate) for candidate in plan.candidates],
        predicted_step_s=mesh.step_s,
        predicted_bubble_fraction=float(timeline.bubble_fraction),
        predicted_peak_bytes=list(chosen.peak_bytes),
        serial_step_s=sum(count * layer.busy_s + layer.update_s for layer in costs.layers),
        link=LinkRow.of(link),
        microbatches=count,
        first_microbatches=mesh.parts,
        recomputed="" if again is None else str(again),
        replicas=mesh.replicas,
        replica_devices=[
            devices[first : first + chosen.devices] for first in range(0, len(devices), chosen.devices)
        ],
        exchange_s=chosen.exchange_s,
        compared_replicas=[_replicas_row(each, chosen) for each in mesh.tried] if len(mesh.tried) > 1 else [],
    )


def _replicas_row(each: Replicas, chosen: Replicas) -> ReplicasRow:
    if each.plan is None:
        return ReplicasRow(each.count, each.devices, reason=each.reason)
    taken = (each.count, each.devices) == (chosen.count, chosen.devices)
    schedule = each.plan.schedule.policy
    return ReplicasRow(each.count, each.devices, schedule, each.step_s, max(each.peak_bytes), taken)


def limits_of(mesh: Mesh, costs: CostTable) -> list[str]:
    """Say how the predicted step spends time other than with all devices at work."""
    plan, exchange_s, link = mesh.plan, mesh.chosen.exchange_s, mesh.plan.problem.link
    stages, step_s, count = plan.problem.layers, plan.step_s, plan.schedule.microbatches
    parts = link.free, dataclasses.replace(link, machines=()), link.without_runtime
    unlinked_s, apart_s, alone_s = (
        other.step_s + simulate(plan.schedule, stages, other).makespan_s for other in parts
    )
    on_devices = zip(costs.layers, mesh.slower_by(), strict=True)
    largest_s, largest = max((layer.busy_s * slower, layer.name) for layer, slower in on_devices)
    return [
        f"bubbles {float(plan.timeline.bubble_fraction):.0%}",
        f"link {1 - unlinked_s / step_s:.0%}",
        *([f"adding up replicas' gradients {exchange_s / mesh.step_s:.0%}"] if exchange_s else []),
        *([f"devices that share {link.cores} cores {1 - apart_s / step_s:.0%}"] if apart_s < step_s else []),
        *([f"the runtime itself {1 - alone_s / step_s:.0%}"] if alone_s < step_s else []),
        f"the largest layer, {largest}, {count * largest_s / step_s:.0%} of the step",
    ]


def _candidate_row(candidate: Candidate) -> CandidateRow:
    stages, trial = len(candidate.problem.bounds), candidate.trial
    if trial is None:
        return CandidateRow(candidate.name, stages, reason=with_units(candidate.reason))
    return CandidateRow(candidate.name, stages, trial.step_s, trial.peak_bytes)


def _stage_row(plan: Plan, stage: int, costs: CostTable, devices: Sequence[str]) -> StageRow:
    first, last = plan.problem.bounds[stage]
    stages, device = plan.problem.layers, plan.schedule.device_of_stage[stage]
    (speed,) = plan.problem.link.speeds_of([device])
    own = stages[stage].slowed(1 / speed)
    inputs = stage_inputs(plan.schedule, stages, len(stages))
    return StageRow(
        stage=stage,
        device=devices[device],
        layers=[layer.name for layer in costs.layers[first : last + 1]],
        seconds={kind: getattr(own, attribute) for kind, attribute in SECONDS.items()},
        weight_bytes=own.weight_bytes,
        slot_bytes=own.slot_bytes,
        activation_bytes=own.activation_bytes,
        sends={to: size for to, read in enumerate(inputs) for source, size in read if source == stage},
        why=_why(plan, stage, costs),
        speed=speed,
    )


def _why(plan: Plan, stage: int, costs: CostTable) -> str:
    """Return a stage's share of the seconds, what it sends, and a layer that alone takes too long."""
    first, last = plan.problem.bounds[stage]
    layers, speeds = costs.layers, plan.problem.link.speeds_of(plan.schedule.device_of_stage)
    mine_s = sum(layer.busy_s for layer in layers[first : last + 1]) / speeds[stage]
    fair_s = sum(layer.busy_s for layer in layers) / sum(speeds)
    text = f"{seconds_text(mine_s)} of each micro-batch's forward and backward pass, an equal share would be "
    text += seconds_text(fair_s)
    if last + 1 < len(layers):
        text += f"; {bytes_text(crossing_bytes(layers, last))} cross the cut behind it"
    for owner, size in plan.problem.layers[stage].tied:
        if plan.schedule.device_of_stage[owner] != plan.schedule.device_of_stage[stage]:
            text += f"; {bytes_text(size)} of gradients go to stage {owner}, whose weights it uses"
    largest = max(layers[first : last + 1], key=lambda layer: layer.busy_s)
    alone_s = largest.busy_s / speeds[stage]
    if alone_s > 1.2 * fair_s:
        text += f"; {largest.name} alone takes {seconds_text(alone_s)}, and is not cut further"
    return text


def note_loops_and_turns(report: Report, step: StepGraph) -> None:
    """Note once which recurrent layers run in several loops, and that updates come in turns."""
    counts, turns = loops_of_layers(layer.name for layer in step.graph.layers), step.turns_with_updates
    if counts:
        said = ", ".join(f"{name} run in {count} loops" for name, count in counts.items())
        text = f"time steps of {said}: their weights' gradients are added up in that order"
        report.note(text, log=logging.INFO)
    if turns > 1:
        text = (
            f"train_step updates weights in {turns} turns, each by what the one before has left: all "
            "micro-batches take a turn before the next; plans count the turns together"
        )
        report.note(text, log=logging.INFO)


# Training waits for what would be better.
_MOST_S = 5.0


def advice(
    plan: Mesh, layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest, alone: bool, gain: Gain
) -> str:
    """Return one line: how much slower it is, and which devices and micro-batches to take.

    Predictions are corrected by the error of the present plan's.  ``alone``: one process trains, whose
    devices may hold several replicas.
    """
    began_s = time.perf_counter()
    corrected = gain.ours_median_s / plan.step_s
    predicted: list[tuple[float, PlanRequest, int]] = []
    lost_s = min(gain.ours_median_s, gain.baseline_median_s)
    for other in _others(wanted):
        if _least_step_s(layers, wanted.microbatches, other.link, other.devices) * corrected > lost_s:
            continue
        if predicted and time.perf_counter() - began_s > _MOST_S:
            break
        of_part = [layer.scaled(wanted.microbatches / other.microbatches) for layer in layers]
        try:
            counts = counts_of(AUTO, other.devices, other.microbatches) if alone else (1,)
            mesh = make_mesh(of_part, units, other, counts)
            predicted.append((mesh.step_s * corrected, other, mesh.replicas))
        except OOOError:  # too few layers, or too much memory
            continue
    best_s, best, count = min(predicted, key=lambda row: row[0], default=(math.inf, wanted, 1))
    if best_s > lost_s:
        better = "one device (mode='single_device') is faster than any other split that was simulated"
    else:
        options = f"devices={best.devices}, microbatches={best.microbatches}"
        options += f", replicas={count}" if count > 1 else ""
        better = f"by simulation {options} takes {seconds_text(best_s)}"
    return f"{gain.text}; {better}"


def _least_step_s(layers: Sequence[LayerCosts], microbatches: int, link: Link, devices: int) -> float:
    """Return a lower bound for every schedule on so many devices: the seconds of all computation.

    It assumes that each device, or the cores of a machine that has all of them, always work.
    """
    least_s = sum(layer.busy_s for layer in layers) / sum(link.speeds_of(range(devices)))
    shares = [layer.occupancy for layer in layers if layer.occupancy is not None]
    alone = len(link.machines) == devices and len(set(link.machines)) == 1 and not link.speeds
    if alone and len(shares) == len(layers):
        tasks = [(layer.forward_s, layer.output_grad_s, layer.weight_grad_s) for layer in layers]
        least_s = max(least_s, float((np.array(tasks) * np.array(shares)).sum()))
    return microbatches * least_s


def _others(wanted: PlanRequest) -> Iterator[PlanRequest]:
    for devices in range(2, wanted.devices + 1):
        for microbatches in {max(1, wanted.microbatches // 2), wanted.microbatches, 2 * wanted.microbatches}:
            if (devices, microbatches) != (wanted.devices, wanted.microbatches):
                schedule, among = "auto" if wanted.own else wanted.schedule, wanted.among(range(devices))
                yield dataclasses.replace(
                    among, microbatches=microbatches, stages=None, schedule=schedule, own=None
                )


def why_uncut(report: Report, devices: int, too_short: bool) -> str:
    """Say why one device goes on, before the model is cut; empty: several are predicted to be faster.

    This is also said if one device cannot be measured (the model does not fit on it, ``compare=False``), but
    not if that is because the fit is ``too_short``.
    """
    measured, predicted_s = report.baselines_s.get(ONE_DEVICE), report.predicted_step_s
    if not measured:
        said = f"whether {devices} devices are faster was not measured: {report.no_baseline}"
        return said if too_short else ""
    one_s = statistics.median(measured)
    if predicted_s is None or predicted_s < one_s:
        return ""
    return (
        f"{devices} devices are predicted to take {seconds_text(predicted_s)} a step, one takes "
        f"{seconds_text(one_s)}, measured"
    )


def why_back(report: Report) -> str:
    """Say why the model returns to one device after steps on several were measured; empty: it stays."""
    gain, first = report.gain, report.gain_over_first
    if gain is None and first is not None and first.slower:
        return f"measured: {first.text}"
    if gain is None or gain.faster or gain.ratio >= 1:
        return ""
    return f"measured: {gain.text}"
