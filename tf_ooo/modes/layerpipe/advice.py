"""Simulates, with measured costs, what would be better where LayerPipe is slower than one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OOOError
from tf_ooo.report.gain import Gain
from tf_ooo.units import seconds_text

# Batches of so many times the rows.
_ROWS = (1, 2, 4)
# Training waits for what would be better.
_MOST_S = 5.0
StepSeconds = Callable[[Sequence[LayerCosts], int], float]


def advice(
    layers: Sequence[LayerCosts], devices: int, predicted_s: float, step_s: StepSeconds, gain: Gain
) -> str:
    """Return one line: how much slower, and which devices and batches to take.

    Args:
        layers: costs of one batch.
        devices: of the present plan.
        predicted_s: seconds of its step; predictions are corrected by what this one was wrong by.
        step_s: plans for layers on so many devices, and predicts the seconds of a step.
        gain: as measured.
    """
    began_s = time.perf_counter()
    corrected = gain.ours_median_s / predicted_s
    best_s, best_rows, best_devices = gain.baseline_median_s, 0, 1
    for count in range(2, devices + 1):
        for rows in _ROWS:
            if (count, rows) == (devices, 1) or time.perf_counter() - began_s > _MOST_S:
                continue
            try:
                each_s = step_s([layer.scaled(rows) for layer in layers], count) * corrected / rows
            except OOOError:  # too few layers
                continue
            if each_s < best_s:
                best_s, best_rows, best_devices = each_s, rows, count
    if not best_rows:
        return f"{gain.text}; one device (mode='single_device') is faster than all that was simulated"
    larger = f", batches of {best_rows} times as many rows" if best_rows > 1 else ""
    for_each = " for each batch of today's rows" if best_rows > 1 else ""
    return f"{gain.text}; by simulation devices={best_devices}{larger} takes {seconds_text(best_s)}{for_each}"
