"""Searches the lanes of small pipelines and the devices of their stages, by steps of a local search.

A tabu search changes lanes: only moves at the ends of a block of the critical path, or out of it, can shorten
the path (job shops, Nowicki and Smutnicki 1996).  Threshold accepting changes devices; each placement's order
is justified anew.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers, lane_peak_bytes
from tf_ooo.planning.building.step_tasks import ROUNDS, StepTasks, justified, shortest_justified
from tf_ooo.planning.building.walk import walk
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import KIND_NUMBER, Floats, Ints
from tf_ooo.planning.simulation.clock import Tasks, Times, run
from tf_ooo.planning.simulation.simulator import task_seconds

_TABU, _MOVES, _MOVES_WITHOUT_GAIN = 6, 200, 60
Lanes = list[list[int]]
# Deals stages out to devices with several each, so that F, dO and dW of all devices are alike. A device whose
# three sums are equal to the mean can be busy all the time. F counts by itself because nothing else can run
# until the first micro-batch has been through; F and dO count because dW fills their gaps. Each of p devices
# has one of the first p stages, one of the next p and so on (a round): a device without an early stage would
# begin late.

# (weight of F and of dO beside the sum of all three, the power that makes the largest count most).
_TASTES = ((0.1, 8), (0.1, 16), (0.3, 8), (0.3, 16), (1.0, 8), (1.0, 16))
_SWEEPS = 20


@dataclass(frozen=True)
class _Order:
    """Holds an order of all lanes, the times of its nodes, and the node that was moved to make it."""

    lanes: Lanes
    times: Times
    moved: int = -1


_makespan_s = attrgetter("times.makespan_s")


def improved(stages: StagedLayers, schedule: Schedule) -> Schedule:
    """Return an order at least as fast, within the limit if ``schedule`` is; messages do not queue here."""
    search = _LaneSearch(stages, schedule)
    times = search.times(search.first)
    if times is None:  # it waits for itself
        return schedule
    search.shortest_s = times.makespan_s
    best = walk(
        _Order(search.first, times),
        search.moved,
        _makespan_s,
        itertools.repeat(1.0, _MOVES),
        bound_s=search.bound_s * (1 + 1e-12),
        tolerance=math.inf,
        patience=_MOVES_WITHOUT_GAIN,
    )
    orders = zip(schedule.lanes, best.lanes, strict=True)
    lanes = {key: TaskList(search.relation.codes[np.array(lane, np.int64)]) for key, lane in orders}
    return stages.schedule(schedule.policy, lanes, schedule.fused_backward)


class _LaneSearch:
    """Searches orders of the lanes; nodes are those of the first schedule's relation."""

    def __init__(self, stages: StagedLayers, schedule: Schedule) -> None:
        problem = stages.problem
        self.relation = relation = Relation(schedule, problem.layers)
        self.stages, self.random = stages, random.Random(0)
        seconds = task_seconds(relation, problem.layers, problem.link)
        kinds, numbers = relation.fields.kind, relation.fields.stage
        sending = kinds < len(stages.messages_s)
        seconds[sending] += stages.messages_s[kinds[sending], numbers[sending]]
        self.is_weight_grad = (relation.fields.kind == KIND_NUMBER["dW"]).tolist()
        self.fixed = (relation.fields.kind == KIND_NUMBER["U"]).tolist()
        source, target, lag_s = relation.within_step(problem.link)
        lag_s = np.where(relation.device[source] == relation.device[target], 0.0, lag_s)
        self.tasks, self.turned = Tasks(seconds, source, target, lag_s), Tasks(seconds, target, source, lag_s)
        bounds = relation.bases.tolist()
        self.first: Lanes = [list(range(a, b)) for a, b in itertools.pairwise(bounds)]
        self.sizes = stages.sums("stored_bytes"), stages.sums("kept_bytes")
        self.bound_s = self._bound_s()
        self.turn, self.tabu, self.shortest_s = 0, dict[int, int](), math.inf

    def _bound_s(self) -> float:
        """Return a lower bound of the makespan: a lane's work, with the least time before and after it."""
        alone = [[node] for node in range(len(self.tasks.seconds))]
        before_s, after_s = (run(tasks, alone).start_s for tasks in (self.tasks, self.turned))
        bound_s, lanes = 0.0, ([node for node in lane if self.tasks.seconds[node]] for lane in self.first)
        for lane in filter(None, lanes):
            before, after = (min(times[node] for node in lane) for times in (before_s, after_s))
            bound_s = max(bound_s, before + sum(self.tasks.seconds[node] for node in lane) + after)
        return bound_s

    def moved(self, here: _Order) -> _Order | None:
        """Return the fastest neighbour; a task moved lately stays, unless moving it gives a new best."""
        self.turn += 1
        neighbours = (
            order
            for order in self._neighbours(here)
            if self.tabu.get(order.moved, 0) <= self.turn or order.times.makespan_s < self.shortest_s
        )
        neighbour = min(neighbours, key=_makespan_s, default=None)
        if neighbour is not None:
            self.tabu[neighbour.moved] = self.turn + _TABU + self.random.randrange(_TABU)
            self.shortest_s = min(self.shortest_s, neighbour.times.makespan_s)
        return neighbour

    def _neighbours(self, here: _Order) -> Iterator[_Order]:
        """Yield orders one move away that fit into memory and have no deadlock."""
        for number, a, b in self._moves(here):
            lane = here.lanes[number].copy()
            node = lane.pop(a)
            lane.insert(b, node)
            if not self._fits(number, lane):
                continue
            lanes = [*here.lanes[:number], lane, *here.lanes[number + 1 :]]
            times = self.times(lanes)
            if times is not None:
                yield _Order(lanes, times, node)

    def _moves(self, here: _Order) -> Iterator[tuple[int, int, int]]:
        """Yield moves (lane, from, to): swaps at the ends of blocks, dW behind, others before their block."""
        for number, first, last in self._blocks(here):
            lane = here.lanes[number]
            places = range(first, last + 1)
            ends = ((place, last if self.is_weight_grad[lane[place]] else first) for place in places)
            for a, b in sorted({(first, first + 1), (last, last - 1), *ends}):
                if a != b and not self.fixed[lane[a]] and not self.fixed[lane[b]]:
                    yield number, a, b

    def _blocks(self, here: _Order) -> Iterator[tuple[int, int, int]]:
        """Yield the stretches of one critical path on one lane: (lane, first place, last place)."""
        lanes, start, end = here.lanes, here.times.start_s, here.times.end_s
        place = {node: (number, i) for number, lane in enumerate(lanes) for i, node in enumerate(lane)}
        node = max(range(len(end)), key=end.__getitem__)
        number, last = place[node]
        while True:
            _, at = place[node]
            if at and end[lanes[number][at - 1]] == start[node]:
                node = lanes[number][at - 1]
                continue
            if last > at:
                yield number, at, last
            sources = [a for a, lag in self.turned.after[node] if end[a] + lag == start[node]]
            if not sources or start[node] <= 0:
                return
            node = sources[0]
            number, last = place[node]

    def _fits(self, number: int, lane: list[int]) -> bool:
        room = self.stages.room_bytes[self.relation.lanes[number][0]]
        if np.isinf(room):
            return True
        codes = self.relation.codes[np.array(lane, np.int64)]
        return bool(lane_peak_bytes(codes, *self.sizes) <= room * (1 + 1e-12))

    def times(self, lanes: Lanes) -> Times | None:
        """Return when each node runs; None for a deadlock."""
        times = run(self.tasks, lanes)
        return None if any(math.isnan(end_s) for end_s in times.end_s) else times


def placements(seconds: Floats, devices: int) -> Iterator[Ints]:
    """Yield stages in turn, then balanced, int64 (stages,); ``seconds``: F, dO, dW, (3, stages)."""
    in_turn = np.arange(seconds.shape[1]) % devices
    yield in_turn
    for weight, power in _TASTES:
        yield _Balancing(seconds, devices, weight, power).balanced(in_turn)


@dataclass
class _Balancing:
    """Balances loads, relative to their mean over devices: all three kinds, F, dO; shape (3, devices)."""

    seconds: Floats
    devices: int
    weight: float
    power: int

    def balanced(self, start: Ints) -> Ints:
        """Exchange two stages of a round as long as that makes loads more alike; return the devices."""
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
        """Exchange the stage with another of its round if that is better; return whether it was."""
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
# This share of the changes exchanges two stages of a round of about equal length; the others change only the
# order.
_EXCHANGES = 0.8
_NEAR = 2
# Tasks that are placed in all: about ten seconds.
_MOST_TASKS = 6_000_000
_CHANGES_PER_DEVICE = 37


@dataclass(frozen=True)
class Placed:
    """Says where each stage runs, and in which order."""

    place: list[int]
    times: Times


def searched(tasks: StepTasks, busy_s: Floats, places: Iterable[Ints], effort: float = 1.0) -> Placed:
    """Return the best placement after many changes from the given ones; the same for the same costs.

    ``busy_s``: seconds of one micro-batch of each stage; ``effort``: how many changes are tried.
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
    """Remembers the neighbours of the walk's placement: most changes are drawn several times."""

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
        """Return the placement with its order; None where a device has more to do than would be accepted."""
        longest_s = np.bincount(place, self.busy_s, self.tasks.devices).max() * self.tasks.count
        if longest_s >= here.times.makespan_s:
            return None
        return Placed(place, justified(self.tasks, place, here.times))


def _changed(place: list[int], rounds: Sequence[Sequence[int]], draw: random.Random) -> list[int]:
    """Return the placement with two stages of a round of about equal length exchanged, or unchanged."""
    changed = list(place)
    if draw.random() < _EXCHANGES:
        alike = draw.choice(rounds)
        number = draw.randrange(len(alike))
        other = min(len(alike) - 1, max(0, number + draw.randint(-_NEAR, _NEAR)))
        first, second = alike[number], alike[other]
        changed[first], changed[second] = place[second], place[first]
    return changed
