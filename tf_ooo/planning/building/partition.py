"""Which layers go to which stage."""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.costs.layer_costs import LayerCosts
from tf_ooo.errors import OptionsError


def balanced(layers: Sequence[LayerCosts], stages: int) -> tuple[tuple[int, int], ...]:
    """(first, last) layer of stages, the slowest as fast as possible.  OptionsError: too few layers."""
    seconds = [layer.busy_s for layer in layers]
    if stages > len(seconds):
        raise OptionsError(f"{stages} stages are more than the {len(seconds)} layers; use fewer devices")
    if len(set(seconds)) == 1:
        return _equal(len(seconds), stages)
    sums = [0.0]
    for value in seconds:
        sums.append(sums[-1] + value)
    low, high = max(max(seconds), sums[-1] / stages), sums[-1]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _count(seconds, middle) <= stages else (middle, high)
    return _cut(seconds, high * (1 + 1e-12), stages)


def _equal(layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    bounds = [layers * stage // stages for stage in range(stages + 1)]
    return tuple((first, after - 1) for first, after in zip(bounds, bounds[1:], strict=False))


def _count(seconds: Sequence[float], limit_s: float) -> int:
    stages, used = 1, 0.0
    for value in seconds:
        if used + value > limit_s:
            stages, used = stages + 1, 0.0
        used += value
    return stages


def _cut(seconds: Sequence[float], limit_s: float, stages: int) -> tuple[tuple[int, int], ...]:
    """Fills stage after stage up to the limit, but leaves a layer for each stage to come."""
    cuts: list[tuple[int, int]] = []
    first, used = 0, 0.0
    for index, value in enumerate(seconds):
        to_come = stages - len(cuts) - 1
        full = index > first and (used + value > limit_s or len(seconds) - index == to_come)
        if full and to_come:
            cuts.append((first, index - 1))
            first, used = index, 0.0
        used += value
    return (*cuts, (first, len(seconds) - 1))
