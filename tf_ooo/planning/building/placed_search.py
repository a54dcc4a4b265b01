"""Search over which device runs which stage, and in which order: threshold accepting, with orders that are
justified anew for each placement.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.building.justification import Order, StepTasks, justified, shortest_justified
from tf_ooo.planning.model.arrays import Floats, Ints

# How much longer than the order before one may be that is gone on with: so much at first, in the end nothing.
_TOLERANCE = 0.004
_ROUNDS = 6
# Of the changes so many exchange two stages that take about as long, or move one; else only the order changes.
_EXCHANGES, _MOVES = 0.6, 0.8
_NEAR = 4
# Tasks that are placed in all: 5 to 10 seconds.
_MOST_TASKS = 4_000_000
_CHANGES_PER_DEVICE = 25


@dataclass(frozen=True)
class Placed:
    """Where each stage runs, and the order."""

    place: list[int]
    order: Order


def searched(tasks: StepTasks, busy_s: Floats, places: Iterable[Ints]) -> Placed:
    """The best of the given placements, changed as long as that pays; always the same for the same costs.

    ``busy_s``: seconds of one micro-batch of each stage.
    """
    starts = (
        Placed(place, shortest_justified(tasks, place, _ROUNDS)) for place in (each.tolist() for each in places)
    )
    here = best = min(starts, key=lambda placed: placed.order.makespan_s)
    changes = min(_CHANGES_PER_DEVICE * tasks.devices, _MOST_TASKS // (2 * len(tasks.seconds)))
    draw, alike = random.Random(0), np.argsort(busy_s, kind="stable").tolist()
    bound_s = busy_s.sum() * tasks.count / tasks.devices
    for number in range(changes):
        if best.order.makespan_s <= bound_s * (1 + 1e-9):
            break
        place = _changed(here.place, alike, tasks.devices, draw)
        longest_s = np.bincount(place, busy_s, tasks.devices).max() * tasks.count
        if longest_s >= best.order.makespan_s:
            continue
        changed = Placed(place, justified(tasks, place, here.order))
        left = _TOLERANCE * (1 - number / changes)
        limit_s = min(here.order.makespan_s * (1 + left), best.order.makespan_s * (1 + 2 * _TOLERANCE))
        if changed.order.makespan_s <= limit_s:
            here = changed
        best = min(best, here, key=lambda placed: placed.order.makespan_s)
    return best


def _changed(place: list[int], alike: Sequence[int], devices: int, draw: random.Random) -> list[int]:
    """Two stages of about the same seconds exchanged, or one moved, or the same; no device without a stage."""
    changed, share = list(place), draw.random()
    if share < _EXCHANGES:
        number = draw.randrange(len(alike))
        stages = alike[number], alike[min(len(alike) - 1, max(0, number + draw.randint(-_NEAR, _NEAR)))]
        changed[stages[0]], changed[stages[1]] = place[stages[1]], place[stages[0]]
    elif share < _MOVES:
        stage = draw.randrange(len(place))
        if place.count(place[stage]) > 1:
            changed[stage] = draw.randrange(devices)
    return changed
