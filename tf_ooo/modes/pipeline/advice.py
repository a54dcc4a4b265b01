"""Simulates, with the measured costs, what would be better where a pipeline is slower than one device."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OOOError
from tf_ooo.modes.pipeline.mesh import AUTO, Mesh, counts_of, make_mesh
from tf_ooo.modes.pipeline.planning import PlanRequest
from tf_ooo.planning.building.by_name import Bounds
from tf_ooo.report.gain import Gain
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
