"""Keeps orders within each device's memory: a forward waits for room, and tasks that free memory go first.

There is no deadlock: whatever begins leaves enough room for the oldest micro-batch to pass all stages of the
device, then for the next one, and so on (the banker's algorithm, Dijkstra 1965).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import KINDS, StepTasks
from tf_ooo.planning.model.task import Floats
from tf_ooo.planning.simulation.clock import Times

_ROUNDING_BYTES = 1e-6


class Room:
    """Holds the bytes that each device has for activations, and the bytes that each stage takes.

    ``change``, ``beside``: for each stage's F, dO and dW, the bytes that it adds, and the extra bytes while
    it runs, both float64 (3 x stages,).
    """

    def __init__(self, stages: StagedLayers) -> None:
        self.stages, self.devices = stages, np.tile(stages.devices, len(KINDS))
        self.stored, self.kept = stages.sums("stored_bytes"), stages.sums("kept_bytes")
        again = stages.sums("recomputed_bytes")
        self.change: Floats = np.concatenate([self.stored, self.kept - self.stored, -self.kept])
        self.beside: Floats = np.concatenate([self.stored, again, stages.summand_bytes])
        # The stages' room leaves a place for what one dO computes again.
        self.again_bytes = self._largest(again)
        self.bytes: Floats = stages.room_bytes + self.again_bytes + _ROUNDING_BYTES

    def _largest(self, sizes: Floats) -> Floats:
        largest = np.zeros(self.stages.problem.devices)
        np.maximum.at(largest, self.stages.devices, sizes)
        return largest

    @cached_property
    def for_batches(self) -> Floats:
        """Return each device's bytes for micro-batches, less the extra bytes while a dO or dW runs."""
        beside: Floats = np.maximum(self._largest(self.stages.summand_bytes), self.again_bytes)
        return self.bytes - beside

    @cached_property
    def one_batch(self) -> Floats:
        """Return the bytes of one micro-batch in all stages of each device."""
        most = np.maximum(self.stored, self.kept)
        return np.bincount(self.stages.devices, most, self.stages.problem.devices).astype(float)

    @property
    def for_one(self) -> bool:
        """Return whether each device has room for one micro-batch in all of its stages."""
        return bool((self.one_batch <= self.for_batches).all())

    def over_bytes(self, tasks: StepTasks, times: Times) -> float:
        """Return how far the worst device is above its room with this order."""
        begun = np.array(times.begun) // tasks.count
        devices = self.devices[begun]
        peaks = [self._peak_bytes(begun[devices == device]) for device in range(len(self.bytes))]
        return float((peaks - self.bytes).max())

    def _peak_bytes(self, begun: Sequence[int]) -> float:
        change = self.change[begun]
        after = np.cumsum(change)
        while_they_run = after - change + self.beside[begun]
        return float(max(after.max(initial=0.0), while_they_run.max(initial=0.0)))

    def kept_by(self, tasks: StepTasks, times: Times) -> Times:
        """Return times of the same order in which forwards wait for room; one micro-batch fits."""
        first_begun: list[int] = np.argsort(np.array(times.start_s), kind="stable").tolist()
        return tasks.run(self.stages.place, first_begun, choose=_WithinRoom(self, tasks, first_begun))


@dataclass
class _Device:
    """Counts a device's bytes: for each micro-batch those that it holds, and those it needs to pass."""

    free: float
    held: list[float]
    needed: list[float]
    left: list[int]
    oldest: int = 0

    def may_take(self, batch: int, size: float) -> bool:
        """Return whether micro-batches can pass one by one once this one has ``size`` more bytes."""
        free = self.free - size
        if free < 0:
            return False
        for older in range(self.oldest, batch):
            if self.needed[older] > free:
                return False
            free += self.held[older]
        return self.needed[batch] - size <= free

    def take(self, batch: int, size: float) -> None:
        self.free -= size
        self.held[batch] += size
        self.needed[batch] -= max(size, 0.0)
        self.left[batch] -= 1
        while self.oldest < len(self.left) and not self.left[self.oldest]:
            self.oldest += 1


class _WithinRoom:
    """Begins the first of ``urgent`` that is ready and has room; one micro-batch fits."""

    def __init__(self, room: Room, tasks: StepTasks, urgent: Sequence[int]) -> None:
        self.urgent, self.batch, self.count = urgent, tasks.batch, tasks.count
        self.rank: list[int] = np.argsort(urgent).tolist()
        self.change: list[float] = room.change.tolist()
        self.device_of: list[int] = room.devices.tolist()
        left = np.bincount(room.devices, minlength=tasks.devices).tolist()
        each = zip(room.for_batches.tolist(), room.one_batch.tolist(), left, strict=True)
        count = tasks.count
        self.devices = [_Device(free, [0.0] * count, [one] * count, [of] * count) for free, one, of in each]
        self.coming: list[list[tuple[float, int]]] = [[] for _ in self.devices]
        self.ready: list[list[int]] = [[] for _ in self.devices]

    def known(self, task: int, ready_s: float) -> None:
        heappush(self.coming[self.device_of[task // self.count]], (ready_s, self.rank[task]))

    def take(self, lane: int, now: float) -> int:
        coming, ready, device = self.coming[lane], self.ready[lane], self.devices[lane]
        while coming and coming[0][0] <= now:
            heappush(ready, heappop(coming)[1])
        blocked: list[int] = []
        begun = -1
        while ready and begun < 0:
            rank = heappop(ready)
            task = self.urgent[rank]
            size, batch = self.change[task // self.count], self.batch[task]
            if size <= 0 or device.may_take(batch, size):
                device.take(batch, size)
                begun = task
            else:
                blocked.append(rank)
        for rank in blocked:
            heappush(ready, rank)
        return begun
