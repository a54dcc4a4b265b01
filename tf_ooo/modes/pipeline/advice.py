"""Simulates, with the measured costs, what would be better where a pipeline is slower than one device."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OOOError
from tf_ooo.fit.baseline import ONE_DEVICE
from tf_ooo.modes.pipeline.mesh import Mesh, counts_of, make_mesh
from tf_ooo.modes.pipeline.options import AUTO
from tf_ooo.modes.pipeline.planning import PlanRequest
from tf_ooo.planning.building.by_name import Bounds
from tf_ooo.report.gain import Gain
from tf_ooo.report.report import Report
from tf_ooo.units import seconds_text

# Training waits for what would be better.
_MOST_S = 5.0


def advice(
    plan: Mesh, layers: Sequence[LayerCosts], units: Bounds, wanted: PlanRequest, alone: bool, gain: Gain
) -> str:
    """Return one line: how much slower, and which devices and micro-batches to take.

    Predictions are corrected by what the present plan's was wrong by.  ``alone``: one process trains, whose
    devices may be those of several replicas.
    """
    began_s = time.perf_counter()
    corrected = gain.ours_median_s / plan.step_s
    predicted: list[tuple[float, PlanRequest, int]] = []
    for other in _others(wanted):
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
    if best_s > min(gain.ours_median_s, gain.baseline_median_s):
        better = "one device (mode='single_device') is faster than any other split that was simulated"
    else:
        options = f"devices={best.devices}, microbatches={best.microbatches}"
        options += f", replicas={count}" if count > 1 else ""
        better = f"by simulation {options} takes {seconds_text(best_s)}"
    return f"{gain.text}; {better}"


def _others(wanted: PlanRequest) -> Iterator[PlanRequest]:
    for devices in range(2, wanted.devices + 1):
        for microbatches in {max(1, wanted.microbatches // 2), wanted.microbatches, 2 * wanted.microbatches}:
            if (devices, microbatches) != (wanted.devices, wanted.microbatches):
                schedule = "auto" if wanted.own else wanted.schedule
                yield dataclasses.replace(
                    wanted.among(range(devices)),
                    microbatches=microbatches,
                    stages=None,
                    schedule=schedule,
                    own=None,
                )


def why_uncut(report: Report, devices: int, too_short: bool) -> str:
    """Say why one device goes on, before the model is cut; empty: several are predicted to be faster.

    Also where one device cannot be measured (the model does not fit on it, ``compare=False``), unless that is
    because the fit is ``too_short``.
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
    """Say why the model goes back to one device, when steps on several were measured; empty: they stay."""
    gain, first = report.gain, report.gain_over_first
    if gain is None and first is not None and first.slower:
        return f"measured: {first.text}"
    if gain is None or gain.faster or gain.ratio >= 1:
        return ""
    return f"measured: {gain.text}"
