"""Fills a report with what a graph, a plan and measured steps tell."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tf_ooo.report.parts import StepOps
from tf_ooo.report.report import Report
from tf_ooo.report.sections import LayerRow

if TYPE_CHECKING:
    from grappler_passes.graph.training_graph import TrainingGraph


def layer_rows_of(graph: TrainingGraph) -> list[LayerRow]:
    """Return one row per layer: index, name, ops of dW, U and communication."""
    rows = []
    for layer in graph.layers:
        counts = len(layer.weight_grad_ops), len(layer.update_ops), len(layer.communication_ops)
        rows.append(LayerRow(layer.index, layer.name, *counts))
    return rows


def step_ops(graph: TrainingGraph, layers: Sequence[LayerRow], mixed: Mapping[str, str]) -> StepOps:
    """Say what a step consists of."""
    return StepOps(graph.counts(), dict(graph.unclassified), dict(mixed), layers)


def fill_step_times(report: Report, step_s: Sequence[float]) -> None:
    """Fill in the measured steps of several devices."""
    if not step_s:
        return
    median_s = statistics.median(step_s)
    noise_s = statistics.median(abs(each_s - median_s) for each_s in step_s)
    report.change(steps_s=list(step_s), measured_step_s=median_s, step_noise_s=noise_s)
    if report.layerpipe:
        report.change(layerpipe=replace(report.layerpipe, step_s=list(step_s)))
    else:
        report.change(pipeline=replace(report.pipeline, step_s=list(step_s)))
