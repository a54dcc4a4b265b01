"""Backward passes with dW of the first k layers last: -1 - i is dO of layer i, i its dW."""

from __future__ import annotations

from tf_ooo.planning.building.step_model import StepModel
from tf_ooo.planning.model.problem import Problem

_TRY_ALL_UP_TO = 256
_NEIGHBOURS = 8


def order(layers: int, k: int) -> list[int]:
    """Return the backward tasks: -1 - i is dO of layer i, i is its dW."""
    upper = [task for layer in range(layers - 1, k - 1, -1) for task in (-1 - layer, layer)]
    return [*upper, *(-1 - layer for layer in range(k - 1, -1, -1)), *range(k)]


def by_period(problem: Problem) -> list[int]:
    """Return the k that were tried, the fastest first; of equally fast ones the smallest."""
    model = StepModel(problem)
    layers = model.layers
    periods_s: dict[int, float] = {}
    place = {task.stage: number for number, task in enumerate(model.comms)}

    def period_s(k: int) -> float:
        if k not in periods_s:
            backward = order(layers, k)
            periods_s[k] = model.run(backward, [place[task] for task in backward if task in place]).period_s
        return periods_s[k]

    # 64 values spread over all, both ends among them.
    samples = sorted({layers * step // 63 for step in range(64)})
    for k in range(layers + 1) if layers <= _TRY_ALL_UP_TO else samples:
        period_s(k)
    # Around the best ones, with steps that become smaller.
    step = layers // 63 if layers > _TRY_ALL_UP_TO else 0
    while step:
        for best in sorted(periods_s, key=periods_s.__getitem__)[:_NEIGHBOURS]:
            for k in (best - step, best + step):
                if 0 <= k <= layers:
                    period_s(k)
        step //= 2
    return sorted(periods_s, key=lambda k: (periods_s[k] * (1 + 1e-12 * k), k))
