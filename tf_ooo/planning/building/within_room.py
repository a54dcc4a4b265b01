"""Keeps orders within each device's memory: a forward waits for room, and what gives room back goes first.

No order waits for itself: whatever begins leaves enough room for the oldest micro-batch to pass all stages of
the device, then for the next one, and so on (the banker's algorithm, Dijkstra 1965).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import StepTasks
from tf_ooo.planning.model.task import KIND_NUMBER, Fields, Floats, Ints
from tf_ooo.planning.simulation.clock import Times

_ROUNDING_BYTES = 1e-6


class Room:
    """Holds the bytes that each device has for activations, and what each stage takes of them.

    ``lacking_bytes``: what the device that lacks most would need for one micro-batch in all of its stages.
    """

    def __init__(self, stages: StagedLayers) -> None:
        self.stages, devices = stages, stages.problem.devices
        self.stored, self.kept = stages.sums("stored_bytes"), stages.sums("kept_bytes")
        # Summands stand beside the activations, as what is computed again does; never both.
        summands, again = np.zeros(devices), np.zeros(devices)
        self.summands, self.again_bytes = stages.summand_bytes, stages.sums("recomputed_bytes")
        np.maximum.at(summands, stages.devices, self.summands)
        np.maximum.at(again, stages.devices, self.again_bytes)
        self.bytes: Floats = stages.room_bytes - np.maximum(summands - again, 0.0) + _ROUNDING_BYTES
        self.whole_bytes: Floats = stages.room_bytes + again + _ROUNDING_BYTES
        self.one_batch: Floats = np.zeros(devices)
        np.add.at(self.one_batch, stages.devices, np.maximum(self.stored, self.kept))
        self.lacking_bytes = float((self.one_batch - self.bytes).max())

    def over_bytes(self, orders: Iterable[Ints]) -> float:
        """Return how much the device that lacks most is above its room with these orders."""
        return float((np.array([self._peak_bytes(codes) for codes in orders]) - self.whole_bytes).max())

    def _peak_bytes(self, codes: Ints) -> float:
        fields = Fields.of(codes)
        stored, kept, again = (size[fields.stage] for size in (self.stored, self.kept, self.again_bytes))
        is_kind = [fields.kind == KIND_NUMBER[kind] for kind in ("F", "dO", "dW")]
        change = np.select(is_kind, [stored, kept - stored, -kept])
        beside = np.select(is_kind, [stored, again, self.summands[fields.stage]])
        after = np.cumsum(change)
        return float(max(after.max(initial=0.0), (after - change + beside).max(initial=0.0)))

    def kept_by(self, tasks: StepTasks, times: Times) -> Times:
        """Return times of the same order in which forwards wait; there is room for one micro-batch."""
        first_begun: list[int] = np.argsort(np.array(times.start_s), kind="stable").tolist()
        return tasks.run(self.stages.place, first_begun, choose=_WithinRoom(self, tasks, first_begun))


@dataclass
class _Device:
    """Counts a device's bytes, and for each micro-batch those that it holds and those it needs to pass."""

    free: float
    held: list[float]
    needed: list[float]
    left: list[int]
    oldest: int = 0

    def may_take(self, batch: int, size: float) -> bool:
        """Return whether all micro-batches can pass, one after the other, once this one has ``size`` more."""
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
    """Begins the first of ``urgent`` that is ready and has room; there is room for one micro-batch."""

    def __init__(self, room: Room, tasks: StepTasks, urgent: Sequence[int]) -> None:
        count, devices = tasks.count, room.stages.devices
        self.urgent, self.batch = urgent, tasks.batch
        self.rank: list[int] = np.argsort(urgent).tolist()
        sizes = np.stack([room.stored, room.kept - room.stored, -room.kept])
        self.size: list[float] = np.repeat(sizes, count).tolist()
        self.device_of: list[int] = np.repeat(np.tile(devices, len(sizes)), count).tolist()
        left = (len(sizes) * np.bincount(devices, minlength=tasks.devices)).tolist()
        each = zip(room.bytes.tolist(), room.one_batch.tolist(), left, strict=True)
        self.devices = [_Device(free, [0.0] * count, [one] * count, [of] * count) for free, one, of in each]
        self.coming: list[list[tuple[float, int]]] = [[] for _ in self.devices]
        self.ready: list[list[int]] = [[] for _ in self.devices]

    def known(self, task: int, ready_s: float) -> None:
        heappush(self.coming[self.device_of[task]], (ready_s, self.rank[task]))

    def take(self, lane: int, now: float) -> int:
        coming, ready, device = self.coming[lane], self.ready[lane], self.devices[lane]
        while coming and coming[0][0] <= now:
            heappush(ready, heappop(coming)[1])
        blocked: list[int] = []
        found = -1
        while ready and found < 0:
            rank = heappop(ready)
            task = self.urgent[rank]
            size, batch = self.size[task], self.batch[task]
            if size <= 0 or device.may_take(batch, size):
                device.take(batch, size)
                found = task
            else:
                blocked.append(rank)
        for rank in blocked:
            heappush(ready, rank)
        return found
