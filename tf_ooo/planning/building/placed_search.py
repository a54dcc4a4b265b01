"""Searches for the device of each stage by threshold accepting; each placement's order is justified anew."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tf_ooo.planning.building.step_tasks import ROUNDS, StepTasks, justified, shortest_justified
from tf_ooo.planning.building.walk import walk
from tf_ooo.planning.model.task import Floats, Ints
from tf_ooo.planning.simulation.clock import Times

# Deals stages out to devices with several each: F, dO and dW of all devices are to be alike. A device whose
# three sums are equal to the mean can be busy all the time. F counts by itself because nothing else can run
# until the first micro-batch has been through, F and dO because dW fills what they leave. Of p devices each
# has one of the first p stages, one of the next p and so on (a round): a device without an early stage would
# begin late.

# (weight of F and of dO beside the sum of all three, the power that makes the largest count most).
_TASTES = ((0.1, 8), (0.1, 16), (0.3, 8), (0.3, 16), (1.0, 8), (1.0, 16))
_SWEEPS = 20


def placements(seconds: Floats, devices: int) -> Iterator[Ints]:
    """Yield stages in turn, then balanced, int64 (stages,); ``seconds`` of F, dO and dW, (3, stages)."""
    in_turn = np.arange(seconds.shape[1]) % devices
    yield in_turn
    for weight, power in _TASTES:
        yield _Balancing(seconds, devices, weight, power).balanced(in_turn)


@dataclass
class _Balancing:
    """Loads are shares of their mean over all devices: all three kinds, F, dO; shape (3, devices)."""

    seconds: Floats
    devices: int
    weight: float
    power: int

    def balanced(self, start: Ints) -> Ints:
        """Balance by exchanging two stages of a round as long as that makes loads more alike."""
        loads = np.stack([self.seconds.sum(axis=0), self.seconds[0], self.seconds[1]])
        means = loads.sum(axis=1, keepdims=True) / self.devices
        self.loads: Floats = loads / np.where(means > 0, means, 1.0)
        self.place = start.copy()
        self.of_device = self._of_device()
        for _ in range(_SWEEPS):
            if not sum(self._improve(stage) for stage in range(len(start))):
                break
        return self.place

    def _cost(self, loads: Floats) -> Floats:
        weights = np.array([1.0, self.weight, self.weight])
        cost: Floats = weights @ loads**self.power
        return cost

    def _improve(self, stage: int) -> bool:
        """Exchanges the stage with another of its round, where that is better; whether it did."""
        here, there, of_stage, loads = self.place[stage], self.place, self.loads[:, [stage]], self.of_device
        left, rounds = loads[:, [here]] - of_stage, np.arange(len(there)) // self.devices
        cost = self._cost(loads)
        exchanged = self._cost(left + self.loads) + self._cost(loads[:, there] - self.loads + of_stage)
        allowed = (there != here) & (rounds == rounds[stage])
        gains = np.where(allowed, cost[here] + cost[there] - exchanged, 0.0)
        other = int(gains.argmax())
        if gains[other] <= 1e-9:
            return False
        self.place[stage], self.place[other] = there[other], here
        self.of_device = self._of_device()
        return True

    def _of_device(self) -> Floats:
        return np.stack([np.bincount(self.place, row, self.devices) for row in self.loads]).astype(float)


# Acceptance threshold: the search goes on with an order that is so much longer; it decays to nothing.
_TOLERANCE = 0.004
# The placements to begin with get this share of all that is placed.
_STARTING = 0.25
# So many placements, the best after one round, get the other rounds where nothing is changed.
_LIKELY = 2
# This share of the changes exchanges two stages of a round that take about as long; else only the order
# changes.
_EXCHANGES = 0.8
_NEAR = 2
# Tasks that are placed in all: about ten seconds.
_MOST_TASKS = 6_000_000
_CHANGES_PER_DEVICE = 37
_makespan_s = attrgetter("times.makespan_s")


@dataclass(frozen=True)
class Placed:
    """Says where each stage runs, and in which order."""

    place: list[int]
    times: Times


def searched(tasks: StepTasks, busy_s: Floats, places: Iterable[Ints], effort: float = 1.0) -> Placed:
    """The best of the given placements, changed as long as that pays; always the same for the same costs.

    ``busy_s``: seconds of one micro-batch of each stage; ``effort``: of the changes so many are tried.
    """
    lists, most = [place.tolist() for place in places], _MOST_TASKS // (2 * len(tasks.stage))

    def shortest_first(rounds: int) -> list[Placed]:
        starts = (Placed(place, shortest_justified(tasks, place, rounds)) for place in lists)
        return sorted(starts, key=_makespan_s)

    rounds_each = max(1, min(ROUNDS, int(_STARTING * most) // len(lists)))
    if not effort and rounds_each > 1:
        lists = [start.place for start in shortest_first(1)[:_LIKELY]]
    start = shortest_first(rounds_each)[0]
    changes = int(effort * min(_CHANGES_PER_DEVICE * tasks.devices, most))
    by_length: list[int] = np.argsort(busy_s, kind="stable").tolist()
    firsts = range(0, len(busy_s), tasks.devices)
    rounds = [[stage for stage in by_length if 0 <= stage - first < tasks.devices] for first in firsts]
    draw, neighbours = random.Random(0), _Neighbours(tasks, busy_s)

    def changed(here: Placed) -> Placed | None:
        return neighbours.of(here, _changed(here.place, rounds, draw))

    turns = (1 - number / changes for number in range(changes))
    bound_s = busy_s.sum() * tasks.count / tasks.devices * (1 + 1e-9)
    return walk(start, changed, _makespan_s, turns, bound_s=bound_s, tolerance=_TOLERANCE)


class _Neighbours:
    """Remembers the neighbours of the placement where the walk is: most changes are drawn several times."""

    def __init__(self, tasks: StepTasks, busy_s: Floats) -> None:
        self.tasks, self.busy_s = tasks, busy_s
        self.here: Placed | None = None
        self.known: dict[tuple[int, ...], Placed | None] = {}

    def of(self, here: Placed, place: list[int]) -> Placed | None:
        if here is not self.here:
            self.here, self.known = here, {}
        key = tuple(place)
        if key not in self.known:
            self.known[key] = self._justified(here, place)
        return self.known[key]

    def _justified(self, here: Placed, place: list[int]) -> Placed | None:
        """Return nothing where a device has more to do than would be accepted."""
        longest_s = np.bincount(place, self.busy_s, self.tasks.devices).max() * self.tasks.count
        if longest_s >= here.times.makespan_s:
            return None
        return Placed(place, justified(self.tasks, place, here.times))


def _changed(place: list[int], rounds: Sequence[Sequence[int]], draw: random.Random) -> list[int]:
    """Return two stages of a round that take about as long exchanged, or the same."""
    changed = list(place)
    if draw.random() < _EXCHANGES:
        alike = draw.choice(rounds)
        number = draw.randrange(len(alike))
        other = min(len(alike) - 1, max(0, number + draw.randint(-_NEAR, _NEAR)))
        first, second = alike[number], alike[other]
        changed[first], changed[second] = place[second], place[first]
    return changed
