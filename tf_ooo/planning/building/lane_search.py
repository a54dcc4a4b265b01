"""Tabu search over small pipelines' lanes: only moves at the ends of a block of the critical path, or out of
it, can shorten the path (job shops, Nowicki and Smutnicki 1996).
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers, lane_peak_bytes
from tf_ooo.planning.building.walk import walk
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import KIND_NUMBER
from tf_ooo.planning.simulation.clock import Tasks, Times, run
from tf_ooo.planning.simulation.simulator import task_seconds

_TABU, _MOVES, _MOVES_WITHOUT_GAIN = 6, 200, 60
Lanes = list[list[int]]


@dataclass(frozen=True)
class _Order:
    """An order of all lanes, when each node runs in it, and the node that was moved for it."""

    lanes: Lanes
    times: Times
    moved: int = -1


_makespan_s = operator.attrgetter("times.makespan_s")


def improved(stages: StagedLayers, schedule: Schedule) -> Schedule:
    """As fast or faster, within the memory limit if ``schedule`` is.  Messages do not queue here."""
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
    """Nodes are those of the relation of the first schedule; moves change the lanes only."""

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
        """No order is faster: a lane's work, after what must be before it and before what must be after."""
        alone = [[node] for node in range(len(self.tasks.seconds))]
        before_s, after_s = (run(tasks, alone).start_s for tasks in (self.tasks, self.turned))
        bound_s, lanes = 0.0, ([node for node in lane if self.tasks.seconds[node]] for lane in self.first)
        for lane in filter(None, lanes):
            before, after = (min(times[node] for node in lane) for times in (before_s, after_s))
            bound_s = max(bound_s, before + sum(self.tasks.seconds[node] for node in lane) + after)
        return bound_s

    def moved(self, here: _Order) -> _Order | None:
        """Return the fastest neighbour; a task that was moved lately stays, unless that is the best yet."""
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
        """Orders one move away that fit into memory and in which nothing waits for itself."""
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
        """(lane, from, to): swaps at the ends of blocks, dW behind and others before their block."""
        for number, first, last in self._blocks(here):
            lane = here.lanes[number]
            places = range(first, last + 1)
            ends = ((place, last if self.is_weight_grad[lane[place]] else first) for place in places)
            for a, b in sorted({(first, first + 1), (last, last - 1), *ends}):
                if a != b and not self.fixed[lane[a]] and not self.fixed[lane[b]]:
                    yield number, a, b

    def _blocks(self, here: _Order) -> Iterator[tuple[int, int, int]]:
        """Stretches of one critical path on one lane: (lane, first place, last place)."""
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
        """Return when each node runs; None where they wait for each other."""
        times = run(self.tasks, lanes)
        return None if any(math.isnan(end_s) for end_s in times.end_s) else times
