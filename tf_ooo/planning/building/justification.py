"""Double justification of a pipeline's schedule (Valls, Ballestin and Quintanilla 2005).

All tasks are started anew as soon as they can, from the end of the step towards its beginning, those first
that ended last; then from the beginning again, those first that now begin first.  Each time tasks that hold
nothing up make way for those that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.model.task import encode

_F, _DO, _DW = 0, 1, 2
_KINDS = ("F", "dO", "dW")


@dataclass(frozen=True)
class Order:
    """Says when tasks end if none waits longer than it has to, and in which order they begin."""

    makespan_s: float
    end_s: list[float]
    begun: list[int]


@dataclass(frozen=True)
class _Side:
    """Says what begins after each task, in one direction of time, and how long a message from it takes."""

    after: list[list[int]]
    hop_s: list[float]
    waits: list[int]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int, float]], count: int) -> _Side:
        after: list[list[int]] = [[] for _ in range(count)]
        hop_s, waits = [0.0] * count, [0] * count
        for earlier, later, sent_s in pairs:
            after[earlier].append(later)
            hop_s[earlier] = max(hop_s[earlier], sent_s)
            waits[later] += 1
        return cls(after, hop_s, waits)


class StepTasks:
    """F, dO and dW of all stages and micro-batches; a stage keeps those of at most ``in_flight``.

    ``urgent``: the tasks as list scheduling prefers them: dO, F, dW, of each kind the oldest micro-batch.
    """

    def __init__(self, stages: StagedLayers, in_flight: int) -> None:
        problem = stages.problem
        self.stages, self.count, self.devices = len(stages.bounds), problem.microbatches, problem.devices
        seconds = np.repeat(stages.seconds.reshape(-1), self.count)
        self.seconds: list[float] = seconds.tolist()
        self.stage: list[int] = np.tile(np.repeat(np.arange(self.stages), self.count), 3).tolist()
        self.codes = np.concatenate(
            [encode(kind, np.repeat(np.arange(self.stages), self.count), self._batches()) for kind in _KINDS]
        )
        pairs = self._pairs(stages, in_flight)
        turned = [(later, earlier, sent_s) for earlier, later, sent_s in pairs]
        self.forward, self.reverse = (_Side.of(each, len(self.seconds)) for each in (pairs, turned))
        by_kind = {_DO: 0, _F: 1, _DW: 2}
        size = self.stages * self.count
        self.urgent = sorted(range(3 * size), key=lambda task: (by_kind[task // size], task % self.count))

    def _batches(self) -> np.ndarray:
        return np.tile(np.arange(self.count), self.stages)

    def _pairs(self, stages: StagedLayers, in_flight: int) -> list[tuple[int, int, float]]:
        """(earlier task, later task, seconds of the message, where they are on two devices)."""
        link, batches = stages.problem.link, range(self.count)
        pairs: list[tuple[int, int, float]] = []

        def add(earlier: tuple[int, int], later: tuple[int, int], sent_s: float, behind: int = 0) -> None:
            first, then = (kind_stage[0] * self.stages + kind_stage[1] for kind_stage in (earlier, later))
            pairs.extend(
                (first * self.count + batch - behind, then * self.count + batch, sent_s)
                for batch in batches[behind:]
            )

        for stage in range(self.stages):
            add((_F, stage), (_DO, stage), 0.0)
            add((_DO, stage), (_DW, stage), 0.0)
            # A fit adds up gradients and updates its metrics in the order of the micro-batches.
            for kind in (_F, _DO, _DW):
                add((kind, stage), (kind, stage), 0.0, 1)
            if in_flight < self.count:
                add((_DW, stage), (_F, stage), 0.0, in_flight)
            for source, size in stages.inputs[stage]:
                add((_F, source), (_F, stage), link.seconds(size))
                add((_DO, stage), (_DO, source), link.seconds(size))
        return pairs

    def run(self, place: Sequence[int], urgent: Sequence[int], reverse: bool = False) -> Order:
        """Whenever a device is free it begins what is ready, of that the first of ``urgent``.

        ``reverse``: what ends the step begins.
        """
        side = self.reverse if reverse else self.forward
        after, hop_s, waits, seconds = side.after, side.hop_s, side.waits.copy(), self.seconds
        device_of = [place[stage] for stage in self.stage]
        rank: list[int] = np.argsort(urgent).tolist()
        ready: list[list[int]] = [[] for _ in range(self.devices)]
        idle, begun, end_s = [True] * self.devices, list[int](), [0.0] * len(urgent)
        # Tasks that end, and, numbered behind all tasks, those for which a message arrives.
        events: list[tuple[float, int]] = []
        tasks, now = len(urgent), 0.0
        for task in range(tasks):
            if not waits[task]:
                heappush(ready[device_of[task]], rank[task])
        touched = list(range(self.devices))
        while True:
            for device in touched:
                if idle[device] and ready[device]:
                    task = urgent[heappop(ready[device])]
                    idle[device], end_s[task] = False, now + seconds[task]
                    begun.append(task)
                    heappush(events, (end_s[task], task))
            if not events:
                return Order(now, end_s, begun)
            now, task = heappop(events)
            if task < tasks:
                here, sent_s, arriving = device_of[task], hop_s[task], after[task]
                idle[here] = True
            else:
                here, sent_s, arriving = device_of[task - tasks], 0.0, [task - tasks]
            touched = [here]
            for later in arriving:
                there = device_of[later]
                if sent_s and there != here:
                    heappush(events, (now + sent_s, tasks + later))
                    continue
                waits[later] -= 1
                if not waits[later]:
                    heappush(ready[there], rank[later])
                    if there != here:
                        touched.append(there)

    def lanes(self, place: Sequence[int], order: Order) -> list[list[int]]:
        """Return the tasks of each device, as numbers in :attr:`codes`."""
        lanes: list[list[int]] = [[] for _ in range(self.devices)]
        for task in order.begun:
            lanes[place[self.stage[task]]].append(task)
        return lanes


def justified(tasks: StepTasks, place: Sequence[int], order: Order) -> Order:
    """Place tasks again from the end, then from the beginning; often shorter, but now and then longer."""
    return _again(tasks, place, _again(tasks, place, order, reverse=True))


def shortest_justified(tasks: StepTasks, place: Sequence[int], rounds: int) -> Order:
    """Return the shortest of so many rounds, from list scheduling on."""
    orders = [tasks.run(place, tasks.urgent)]
    for _ in range(rounds):
        orders.append(justified(tasks, place, orders[-1]))
    return min(orders, key=lambda order: order.makespan_s)


def _again(tasks: StepTasks, place: Sequence[int], order: Order, reverse: bool = False) -> Order:
    urgent: list[int] = np.argsort(-np.array(order.end_s), kind="stable").tolist()
    return tasks.run(place, urgent, reverse)
