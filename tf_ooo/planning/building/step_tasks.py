"""One step's F, dO and dW of all stages and micro-batches, for what places and orders them on the clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_ooo.planning.building.pipeline import MODE, StagedLayers
from tf_ooo.planning.model.arrays import Floats, Ints
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import encode
from tf_ooo.planning.simulation.clock import Choose, LaneKind, Tasks, Times, run

KINDS = ("F", "dO", "dW")


class StepTasks:
    """The tasks as the clock runs them; a stage keeps those of at most ``in_flight`` micro-batches.

    They are numbered by kind, then by stage, then by micro-batch.  A fit adds up gradients and updates its
    metrics in the order of the micro-batches, so each waits for the one before, too, unless ``in_turn`` says
    that whoever chooses takes them in that order anyway.
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
        """The tasks as list scheduling prefers them: dO, F, dW, of each kind the oldest micro-batch."""

    def _edges(self, stages: StagedLayers, in_flight: int, in_turn: bool) -> tuple[Ints, Ints, Floats]:
        """Return sources, targets, and seconds of the message between two devices."""
        numbers, lanes = self.numbers, {(0, 0): TaskList(self.codes)}
        shape = Schedule(MODE, "step", lanes, microbatches=self.count, stages=stages.bounds)
        source, target, lag_s = Relation(shape, stages.problem.layers).within_step(stages.problem.link)
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
        """Whenever a device is free it begins what is ready, of that the first of ``urgent``.

        ``place``: the device of each stage; ``reverse``: what ends the step begins; ``choose``: who is asked.
        """
        order = np.array(urgent)
        device_of = self._device_of(place)[order]
        lanes = [order[device_of == device].tolist() for device in range(self.devices)]
        return run(self.turned if reverse else self.tasks, lanes, [LaneKind.PRIORITY] * self.devices, choose)

    def _device_of(self, place: Sequence[int]) -> Ints:
        return np.repeat(np.tile(place, 3), self.count)

    def orders(self, place: Sequence[int], times: Times) -> list[Ints]:
        """Return the codes of each device's tasks in the order of a run."""
        begun = np.array(times.begun, np.int64)
        device_of = self._device_of(place)[begun]
        return [self.codes[begun[device_of == device]] for device in range(self.devices)]
