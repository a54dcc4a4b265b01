"""List scheduling of a pipeline, the heuristic of Zero Bubble (arXiv 2401.10241, section 3.1), also for
several stages on a device: dO before F before dW, F only where memory allows, and a dW rather than a wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import StepTasks
from tf_ooo.planning.model.arrays import Ints
from tf_ooo.planning.model.schedule import Schedule


@dataclass(frozen=True)
class ListChoices:
    """Holds the choices that list scheduling leaves open.

    ``in_flight``: most micro-batches of a stage between F and dW.  ``stage_first``: of ready F the lowest
    stage, else the oldest micro-batch.  ``patience``: wait for a dO or F that comes within this share of dW's
    time.  ``ahead``: by device, most F without their dO.  ``by_room``: no F without room in memory, but for
    the first; several stages on a device could block each other so: there ``in_flight`` bounds the memory.
    """

    in_flight: int
    stage_first: bool = False
    patience: float = 0.0
    ahead: Ints | None = None
    by_room: bool = True


def listed(policy: str, stages: StagedLayers, choices: ListChoices) -> Schedule:
    """The schedule that list scheduling makes."""
    tasks, place = StepTasks(stages, choices.in_flight, in_turn=False), stages.devices.tolist()
    times = tasks.run(place, tasks.urgent, choose=_Listing(stages, tasks, choices))
    return stages.with_updates(policy, tasks.orders(place, times))


@dataclass
class _Device:
    """Tasks that are known, by when they are ready, those that are ready by kind, and the bytes in use."""

    coming: list[tuple[float, int]] = field(default_factory=list)
    forwards: list[tuple[int, int, int]] = field(default_factory=list)
    output_grads: list[tuple[int, int, int]] = field(default_factory=list)
    weight_grads: deque[int] = field(default_factory=deque)
    used: float = 0.0
    ahead: int = 0


class _Listing:
    def __init__(self, stages: StagedLayers, tasks: StepTasks, choices: ListChoices) -> None:
        self.tasks, self.choices = tasks, choices
        self.device_of: list[int] = stages.devices.tolist()
        self.full: list[float] = stages.sums("stored_bytes").tolist()
        self.kept: list[float] = stages.sums("kept_bytes").tolist()
        self.room: list[float] = [room * (1 + 1e-12) for room in stages.room_bytes.tolist()]
        self.devices = [_Device() for _ in self.room]

    def known(self, task: int, ready_s: float) -> None:
        heappush(self.devices[self.device_of[self.tasks.stage[task]]].coming, (ready_s, task))

    def take(self, lane: int, now: float) -> int:
        device = self.devices[lane]
        while device.coming and device.coming[0][0] <= now:
            self._add(device, heappop(device.coming)[1])
        if device.output_grads:
            task = heappop(device.output_grads)[-1]
            stage = self.tasks.stage[task]
            device.used -= self.full[stage] - self.kept[stage]
            device.ahead -= 1
            return task
        if self._may_run_ahead(device, lane):
            task = heappop(device.forwards)[-1]
            device.used += self.full[self.tasks.stage[task]]
            device.ahead += 1
            return task
        if device.weight_grads and not self._waits(device, now):
            task = device.weight_grads.popleft()
            device.used -= self.kept[self.tasks.stage[task]]
            return task
        return -1

    def _add(self, device: _Device, task: int) -> None:
        kind, stage, batch = self.tasks.kind_of(task), self.tasks.stage[task], self.tasks.batch[task]
        if kind == "F":
            rank = (stage, batch) if self.choices.stage_first else (batch, stage)
            heappush(device.forwards, (*rank, task))
        elif kind == "dO":
            heappush(device.output_grads, (batch, -stage, task))
        else:
            device.weight_grads.append(task)

    def _may_run_ahead(self, device: _Device, lane: int) -> bool:
        """Return whether the next forward may begin: memory has room for it, or holds none yet."""
        if not device.forwards:
            return False
        size = self.full[self.tasks.stage[device.forwards[0][-1]]]
        if self.choices.by_room and device.used + size > self.room[lane] and device.used > 1e-6 * size:
            return False
        return self.choices.ahead is None or device.ahead < self.choices.ahead[lane]

    def _waits(self, device: _Device, now: float) -> bool:
        """Return whether something more urgent than a dW comes soon; nothing does where memory is full."""
        if not device.coming or device.forwards:
            return False
        weight_grad_s = self.tasks.tasks.seconds[device.weight_grads[0]]
        return device.coming[0][0] < now + self.choices.patience * weight_grad_s
