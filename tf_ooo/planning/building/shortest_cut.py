"""Cuts of layers into stages whose slowest is as fast as possible, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_ooo.planning.model.arrays import Floats


def shortest_s(sums: Floats, speeds: Sequence[float]) -> float:
    """Return the shortest possible slowest stage.

    Args:
        sums: seconds of the layers before each layer, and of all.
        speeds: of the device of each stage.
    """
    count = len(sums) - 1
    best = sums[1:] / speeds[0]
    for speed in speeds[1:]:
        following = np.full(count, np.inf)
        for end in range(1, count):
            stage = (sums[end + 1] - sums[1 : end + 1]) / speed
            following[end] = np.maximum(best[:end], stage).min()
        best = following
    return float(best[-1])


def cheapest(sums: Floats, messages: Floats, speeds: Sequence[float], limit: float) -> list[int]:
    """Ends of stages, none longer than the limit, with the least to send; empty where there are none."""
    count = len(messages)
    cost = np.where(sums[1:] / speeds[0] <= limit * (1 + 1e-9), 0.0, np.inf)
    back: list[np.ndarray] = []
    for speed in speeds[1:]:
        following, chosen = np.full(count, np.inf), np.zeros(count, int)
        for end in range(1, count):
            fits = (sums[end + 1] - sums[1 : end + 1]) / speed <= limit * (1 + 1e-9)
            total = np.where(fits, cost[:end] + messages[:end], np.inf)
            chosen[end] = int(total.argmin())
            following[end] = total[chosen[end]]
        back.append(chosen)
        cost = following
    if not np.isfinite(cost[-1]):
        return []
    ends = [count]
    for chosen in reversed(back):
        ends.append(int(chosen[ends[-1] - 1]) + 1)
    return ends[::-1]
