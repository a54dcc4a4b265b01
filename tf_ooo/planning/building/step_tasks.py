"""Defines one step's F, dO and dW of all stages and micro-batches; places and orders them on the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from tf_ooo.planning.building.pipeline import MODE, StagedLayers
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import Floats, Ints, encode
from tf_ooo.planning.simulation.clock import Choose, LaneKind, Tasks, Times, run

KINDS = ("F", "dO", "dW")


class StepTasks:
    """Holds the tasks for the clock; a stage keeps activations of at most ``in_flight`` micro-batches.

    They are numbered by kind, then by stage, then by micro-batch.  A fit adds up gradients and updates its
    metrics in the order of the micro-batches, so each also waits for the one before, unless ``in_turn`` says
    that the choice follows that order anyway.
    """

    def __init__(self, stages: StagedLayers, in_flight: int | None = None, in_turn: bool = True) -> None:
        problem = stages.problem
        self.stages, self.count, self.devices = len(stages.bounds), problem.microbatches, problem.devices
        self.numbers = np.arange(3 * self.stages * self.count).reshape(3, self.stages, self.count)
        _, stage, batch = (index.ravel() for index in np.indices(self.numbers.shape))
        size = self.stages * self.count
        self.codes = np.concatenate([encode(kind, stage[:size], batch[:size]) for kind in KINDS])
        self.stage: list[int] = stage.tolist()
        self.batch: list[int] = batch.tolist()
        source, target, lag_s = self._edges(stages, in_flight or self.count, in_turn)
        seconds = np.repeat(stages.seconds.reshape(-1), self.count)
        self.tasks = Tasks(seconds, source, target, lag_s)
        self.turned = Tasks(seconds, target, source, lag_s)
        by_kind = np.repeat([1, 0, 2], size)
        self.urgent: list[int] = np.lexsort((self.numbers.ravel(), batch, by_kind)).tolist()
        """The tasks as list scheduling prefers them: dO, F, dW; within a kind the oldest micro-batch."""

    def _edges(self, stages: StagedLayers, in_flight: int, in_turn: bool) -> tuple[Ints, Ints, Floats]:
        """Return sources, targets, and seconds of the message between two devices."""
        numbers, lanes = self.numbers, {(0, 0): TaskList(self.codes)}
        shape = Schedule(MODE, "step", lanes, microbatches=self.count, stages=stages.bounds)
        relation = Relation(shape, stages.problem.layers)
        source, target, lag_s = relation.within_step(stages.problem.link, stages.devices)
        room = numbers[2, :, :-in_flight], numbers[0, :, in_flight:]
        one_by_one = numbers[:, :, :-1], numbers[:, :, 1:]
        for earlier, later in (room, one_by_one) if in_turn else (room,):
            source = np.concatenate([source, earlier.ravel()])
            target = np.concatenate([target, later.ravel()])
        return source, target, np.concatenate([lag_s, np.zeros(len(source) - len(lag_s))])

    def kind_of(self, task: int) -> str:
        return KINDS[task // (self.stages * self.count)]

    def run(
        self, place: Sequence[int], urgent: Sequence[int], reverse: bool = False, choose: Choose | None = None
    ) -> Times:
        """Run the tasks: a free device begins a ready task, the first in ``urgent``.

        ``place``: the device of each stage; ``reverse``: runs backwards in time; ``choose``: decides instead.
        """
        order = np.array(urgent)
        device_of = self._device_of(place)[order]
        lanes = [order[device_of == device].tolist() for device in range(self.devices)]
        return run(self.turned if reverse else self.tasks, lanes, [LaneKind.PRIORITY] * self.devices, choose)

    def _device_of(self, place: Sequence[int]) -> Ints:
        return np.repeat(np.tile(place, 3), self.count)

    def orders(self, place: Sequence[int], times: Times) -> list[Ints]:
        """Return the codes of each device's tasks, in the order of a run."""
        begun = np.array(times.begun, np.int64)
        device_of = self._device_of(place)[begun]
        return [self.codes[begun[device_of == device]] for device in range(self.devices)]


# List scheduling of a pipeline, the heuristic of Zero Bubble (arXiv 2401.10241, section 3.1), also for
# several stages on a device: dO before F before dW, F only where memory allows, and a dW rather than a wait.


@dataclass(frozen=True)
class ListChoices:
    """Holds the choices that list scheduling leaves open.

    ``in_flight``: most micro-batches of a stage between F and dW.  ``stage_first``: prefer the F of the
    lowest stage, else of the oldest micro-batch.  ``patience``: wait for a dO or F that comes within this
    share of dW's time.  ``ahead``: for each device, most F without their dO.  ``by_room``: no F but the first
    runs without room in memory; as several stages on a device could block each other so, there ``in_flight``
    bounds memory.
    """

    in_flight: int
    stage_first: bool = False
    patience: float = 0.0
    ahead: Ints | None = None
    by_room: bool = True


def listed(policy: str, stages: StagedLayers, choices: ListChoices) -> Schedule:
    """Return the schedule that list scheduling makes."""
    return next(listed_each(policy, stages, [choices]))


def listed_each(policy: str, stages: StagedLayers, choices: Iterable[ListChoices]) -> Iterator[Schedule]:
    """Yield the schedule that list scheduling makes with each of these choices."""
    place, steps = stages.devices.tolist(), dict[int, StepTasks]()
    for choice in choices:
        if choice.in_flight not in steps:
            steps[choice.in_flight] = StepTasks(stages, choice.in_flight, in_turn=False)
        tasks = steps[choice.in_flight]
        times = tasks.run(place, tasks.urgent, choose=_Listing(stages, tasks, choice))
        yield stages.with_updates(policy, tasks.orders(place, times))


@dataclass
class _Device:
    """Holds a device's known tasks by when they are ready, its ready tasks by kind, and its bytes in use."""

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
        """Return whether to wait for a more urgent task than a dW; where memory is full none comes."""
        if not device.coming or device.forwards:
            return False
        weight_grad_s = self.tasks.tasks.seconds[device.weight_grads[0]]
        return device.coming[0][0] < now + self.choices.patience * weight_grad_s


# Double justification of a pipeline's schedule (Valls, Ballestin and Quintanilla 2005). First all tasks are
# started anew from the end of the step towards its beginning, each as soon as it can, those first that ended
# last. Then they are started from the beginning again, those first that now begin first. Each time tasks that
# hold nothing up make way for those that do.


def justified(tasks: StepTasks, place: Sequence[int], times: Times) -> Times:
    """Justify tasks from the end, then from the beginning; the result is often shorter, rarely longer."""
    for reverse in (True, False):
        last_first: list[int] = np.argsort(-np.array(times.end_s), kind="stable").tolist()
        times = tasks.run(place, last_first, reverse)
    return times


# Orders are justified so often, unless one is of many.
ROUNDS = 6


def justified_each(tasks: StepTasks, place: Sequence[int], rounds: int) -> list[Times]:
    """Return the result of list scheduling, and that of each round of justification after it."""
    runs = [tasks.run(place, tasks.urgent)]
    for _ in range(rounds):
        runs.append(justified(tasks, place, runs[-1]))
    return runs


def shortest_justified(tasks: StepTasks, place: Sequence[int], rounds: int = ROUNDS) -> Times:
    """Return the shortest result of list scheduling and so many rounds of justification."""
    return min(justified_each(tasks, place, rounds), key=lambda times: times.makespan_s)
