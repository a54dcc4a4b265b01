"""Tabu search over small pipelines' lanes: only moves at the ends of a block of the critical path, or out of
it, can shorten the path (job shops, Nowicki and Smutnicki 1996).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import rustworkx as rx

from tf_ooo.planning.building.pipeline import StagedLayers, lane_peak_bytes
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import KIND_NUMBER
from tf_ooo.planning.simulation.simulator import task_seconds

_TABU, _MOVES, _MOVES_WITHOUT_GAIN = 6, 200, 60
Lanes = list[list[int]]
# Start and end of each node, seconds.
Times = tuple[list[float], list[float]]


@dataclass(frozen=True)
class _Order:
    """An order of all lanes, when each node runs in it, and the node that was moved for it."""

    lanes: Lanes
    times: Times
    moved: int = -1

    @cached_property
    def makespan_s(self) -> float:
        return max(self.times[1])


def improved(stages: StagedLayers, schedule: Schedule) -> Schedule:
    """As fast or faster, within the memory limit if ``schedule`` is.  Messages do not queue here."""
    search = _LaneSearch(stages, schedule)
    times = search.times(search.first)
    if times is None:  # it waits for itself
        return schedule
    best = search.run(_Order(search.first, times))
    orders = zip(schedule.lanes, best.lanes, strict=True)
    lanes = {key: TaskList(search.relation.codes[np.array(lane, np.int64)]) for key, lane in orders}
    return stages.schedule(schedule.policy, lanes, schedule.fused_backward)


class _LaneSearch:
    """Nodes are those of the relation of the first schedule; moves change the lanes only."""

    def __init__(self, stages: StagedLayers, schedule: Schedule) -> None:
        problem = stages.problem
        self.relation = relation = Relation(schedule, problem.layers)
        self.stages, self.random = stages, random.Random(0)
        self.seconds: list[float] = task_seconds(relation, problem.layers, problem.link).tolist()
        self.is_weight_grad = (relation.fields.kind == KIND_NUMBER["dW"]).tolist()
        self.fixed = (relation.fields.kind == KIND_NUMBER["U"]).tolist()
        self.before: list[list[tuple[int, float]]] = [[] for _ in self.seconds]
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.seconds]
        for edges in relation.edges:
            if edges.steps:
                continue
            for a, b in edges.pairs():
                away = edges.message_bytes is not None and relation.device[a] != relation.device[b]
                lag = problem.link.seconds(edges.message_bytes or 0.0) if away else 0.0
                self.before[b].append((a, lag))
                self.after[a].append((b, lag))
        self.graph = rx.PyDiGraph()
        self.graph.add_nodes_from(self.seconds)
        pairs = [(source, node) for node, needed in enumerate(self.before) for source, _ in needed]
        self.graph.add_edges_from_no_data(pairs)
        bounds = relation.bases.tolist()
        self.first: Lanes = [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
        self.sizes = stages.sums("stored_bytes"), stages.sums("kept_bytes")
        self.bound_s = self._bound_s()

    def _bound_s(self) -> float:
        """No order is faster: a lane's work, after what must be before it and before what must be after."""
        free = self.times([])
        if free is None:
            return 0.0
        tail_s = [0.0] * len(self.seconds)
        for node in sorted(range(len(tail_s)), key=free[1].__getitem__, reverse=True):
            later = (lag + self.seconds[b] + tail_s[b] for b, lag in self.after[node])
            tail_s[node] = max(later, default=0.0)
        lanes = [[node for node in lane if self.seconds[node]] for lane in self.first]
        bounds = (
            min(free[0][n] for n in lane) + sum(self.seconds[n] for n in lane) + min(tail_s[n] for n in lane)
            for lane in lanes
            if lane
        )
        return max(bounds, default=0.0)

    def run(self, start: _Order) -> _Order:
        best = here = start
        tabu: dict[int, int] = {}
        since = 0
        for iteration in range(_MOVES):
            if best.makespan_s <= self.bound_s * (1 + 1e-12):
                break
            # A forbidden move counts if it is faster than all so far.
            neighbours = (
                order
                for order in self._neighbours(here)
                if tabu.get(order.moved, -1) <= iteration or order.makespan_s < best.makespan_s
            )
            neighbour = min(neighbours, key=lambda order: order.makespan_s, default=None)
            if neighbour is None or since > _MOVES_WITHOUT_GAIN:
                break
            here = neighbour
            tabu[here.moved] = iteration + _TABU + self.random.randrange(_TABU)
            since += 1
            if here.makespan_s < best.makespan_s * (1 - 1e-12):
                best, since = here, 0
        return best

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
            moves = {(first, first + 1), (last, last - 1)}
            for place in range(first, last + 1):
                moves.add((place, last if self.is_weight_grad[lane[place]] else first))
            for a, b in sorted(moves):
                if a != b and not self.fixed[lane[a]] and not self.fixed[lane[b]]:
                    yield number, a, b

    def _blocks(self, here: _Order) -> Iterator[tuple[int, int, int]]:
        """Stretches of one critical path on one lane: (lane, first place, last place)."""
        lanes, (start, end) = here.lanes, here.times
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
            sources = [a for a, lag in self.before[node] if end[a] + lag == start[node]]
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
        """Start and end of each node; None where they wait for each other."""
        graph = self.graph.copy()
        in_front: dict[int, int] = {}
        for lane in lanes:
            pairs = list(zip(lane, lane[1:], strict=False))
            graph.add_edges_from_no_data(pairs)
            in_front |= {b: a for a, b in pairs}
        try:
            order = rx.topological_sort(graph)
        except rx.DAGHasCycle:
            return None
        start, end = [0.0] * len(self.seconds), [0.0] * len(self.seconds)
        for node in order:
            ready_s = end[in_front[node]] if node in in_front else 0.0
            for source, lag in self.before[node]:
                ready_s = max(ready_s, end[source] + lag)
            start[node], end[node] = ready_s, ready_s + self.seconds[node]
        return start, end
