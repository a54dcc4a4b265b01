"""List scheduling of a pipeline, the heuristic of Zero Bubble (arXiv 2401.10241, section 3.1), also for
several stages on a device: dO before F before dW, F only where memory allows, and a dW rather than a wait.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.model.arrays import Ints
from tf_ooo.planning.model.schedule import Lane, TaskList
from tf_ooo.planning.model.task import encode

_F, _DO, _DW = 0, 1, 2
_KINDS = ("F", "dO", "dW")


@dataclass(frozen=True)
class ListChoices:
    """Holds the choices that list scheduling leaves open.

    ``in_flight``: most micro-batches between their first F and last dW.  ``stage_first``: of ready F the
    lowest stage, else the oldest micro-batch.  ``patience``: wait for a dO or F that comes within this share
    of dW's time.  ``ahead``: by device, most F without their dO.  ``by_room``: no F without room in memory,
    but for the first; several stages on a device could block each other so: there ``in_flight`` bounds the
    memory.
    """

    in_flight: int
    stage_first: bool = False
    patience: float = 0.0
    ahead: Ints | None = None
    by_room: bool = True


def list_lanes(stages: StagedLayers, choices: ListChoices) -> dict[Lane, TaskList]:
    """The lanes that list scheduling makes, with the updates at their ends."""
    run = _ListScheduling(stages, choices)
    run.run()
    count = stages.problem.devices
    updates = [encode("U", np.flatnonzero(stages.devices == device)) for device in range(count)]
    lanes = enumerate(zip(run.lanes, updates, strict=True))
    return {(device, 0): TaskList(np.concatenate([np.array(c, np.int64), u])) for device, (c, u) in lanes}


class _ListScheduling:
    """Tasks are (kind, stage, micro-batch); a device is busy until its task ends."""

    def __init__(self, stages: StagedLayers, choices: ListChoices) -> None:
        problem = stages.problem
        self.choices, self.count = choices, problem.microbatches
        self.device: list[int] = stages.devices.tolist()
        self.seconds: list[list[float]] = stages.seconds.tolist()
        self.full: list[float] = stages.sums("stored_bytes").tolist()
        self.kept: list[float] = stages.sums("kept_bytes").tolist()
        self.room: list[float] = [room * (1 + 1e-12) for room in stages.room_bytes.tolist()]
        self.used, self.ahead = [0.0] * problem.devices, [0] * problem.devices
        self.lanes: list[list[int]] = [[] for _ in range(problem.devices)]
        self.busy = [False] * problem.devices
        self.forwards: list[list[tuple[int, int]]] = [[] for _ in range(problem.devices)]
        self.output_grads: list[list[tuple[int, int]]] = [[] for _ in range(problem.devices)]
        self.weight_grads: list[deque[tuple[int, int]]] = [deque() for _ in range(problem.devices)]
        self.expected: list[list[float]] = [[] for _ in range(problem.devices)]
        self.entered = 0
        self.unfinished = [0] * self.count
        self.in_flight = 0
        self.events: list[tuple[float, int, bool, int, int, int]] = []
        self.serial = 0
        self._link(stages)

    def _link(self, stages: StagedLayers) -> None:
        """Find the stages that each stage hands on to, and the seconds until a message is there."""
        problem, count = stages.problem, len(self.device)
        self.readers: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        self.sources: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for stage, row in enumerate(stages.inputs):
            for source, size in row:
                away = self.device[source] != self.device[stage]
                lag = problem.link.seconds(size) if away else 0.0
                self.readers[source].append((stage, lag))
                self.sources[stage].append((source, lag))
        self.needs = [
            [[len(self.sources[s])] * self.count for s in range(count)],
            [[len(self.readers[s]) + 1] * self.count for s in range(count)],
        ]
        self.roots = [stage for stage in range(count) if not self.sources[stage]]

    def run(self) -> None:
        self._admit()
        for device in range(len(self.busy)):
            self._dispatch(device, 0.0)
        while self.events:
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] <= now:
                _, _, ends, kind, stage, batch = heapq.heappop(self.events)
                if ends:
                    self._finish(kind, stage, batch)
                    touched |= self._admit()
                else:
                    self._arrive(kind, stage, batch)
                touched.add(self.device[stage])
            for device in touched:
                self._dispatch(device, now)

    def _push(self, time_s: float, ends: bool, kind: int, stage: int, batch: int) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time_s, self.serial, ends, kind, stage, batch))

    def _admit(self) -> set[int]:
        """Lets micro-batches in while there is room; says on which devices they begin."""
        touched: set[int] = set()
        while self.entered < self.count and self.in_flight < self.choices.in_flight:
            for stage in self.roots:
                heapq.heappush(self.forwards[self.device[stage]], self._rank(stage, self.entered))
                touched.add(self.device[stage])
            self.unfinished[self.entered] = len(self.device)
            self.in_flight, self.entered = self.in_flight + 1, self.entered + 1
        return touched

    def _rank(self, stage: int, batch: int) -> tuple[int, int]:
        return (stage, batch) if self.choices.stage_first else (batch, stage)

    def _arrive(self, kind: int, stage: int, batch: int) -> None:
        left = self.needs[kind][stage]
        left[batch] -= 1
        if left[batch] == 0:
            device = self.device[stage]
            if kind == _F:
                heapq.heappush(self.forwards[device], self._rank(stage, batch))
            else:
                heapq.heappush(self.output_grads[device], (batch, -stage))

    def _finish(self, kind: int, stage: int, batch: int) -> None:
        device = self.device[stage]
        self.busy[device] = False
        if kind == _F:
            self._arrive(_DO, stage, batch)
        elif kind == _DO:
            self.used[device] -= self.full[stage] - self.kept[stage]
            self.ahead[device] -= 1
            self.weight_grads[device].append((stage, batch))
        else:
            self.used[device] -= self.kept[stage]
            self.unfinished[batch] -= 1
            self.in_flight -= not self.unfinished[batch]

    def _dispatch(self, device: int, now: float) -> None:
        if self.busy[device]:
            return
        task = self._choose(device, now)
        if task is None:
            return
        kind, stage, batch = task
        self.busy[device] = True
        self.lanes[device].append(int(encode(_KINDS[kind], stage, batch)))
        end = now + self.seconds[kind][stage]
        self._push(end, True, kind, stage, batch)
        for other, lag in (self.readers, self.sources, ())[kind][stage] if kind != _DW else ():
            self._push(end + lag, False, kind, other, batch)
            heapq.heappush(self.expected[self.device[other]], end + lag)

    def _choose(self, device: int, now: float) -> tuple[int, int, int] | None:
        if self.output_grads[device]:
            batch, stage = heapq.heappop(self.output_grads[device])
            return _DO, -stage, batch
        forward = self._next_forward(device)
        if forward is not None:
            return _F, *forward
        if self.weight_grads[device] and not self._waits(device, now):
            return _DW, *self.weight_grads[device].popleft()
        return None

    def _next_forward(self, device: int) -> tuple[int, int] | None:
        if not self.forwards[device]:
            return None
        first, second = self.forwards[device][0]
        stage, batch = (first, second) if self.choices.stage_first else (second, first)
        size, used = self.full[stage], self.used[device]
        if self.choices.by_room and used + size > self.room[device] and used > 1e-6 * size:
            return None  # memory has no room for one more, and holds one already
        if self.choices.ahead is not None and self.ahead[device] >= self.choices.ahead[device]:
            return None
        heapq.heappop(self.forwards[device])
        self.used[device] += size
        self.ahead[device] += 1
        return stage, batch

    def _waits(self, device: int, now: float) -> bool:
        """Return whether something more urgent than a dW comes soon; nothing does where memory is full."""
        coming = self.expected[device]
        while coming and coming[0] <= now:
            heapq.heappop(coming)
        if not coming or self.forwards[device]:
            return False
        weight_grad_s = self.seconds[_DW][self.weight_grads[device][0][0]]
        return coming[0] < now + self.choices.patience * weight_grad_s
