"""The schedule: which task runs where and in which order, as plain data with a text form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.schedule_text import NAME, read, write
from tf_ooo.planning.model.task import KINDS, After, Fields, Lane, Task, TaskList, check_lanes

__all__ = ["KINDS", "After", "Lane", "Schedule", "Task", "TaskList"]

_SHOWN = 5


@dataclass(frozen=True)
class Schedule:
    """An order of tasks for each (device, stream), for one step, which is repeated.

    Attributes:
        mode: single_device, data_parallel, pipeline or layerpipe.
        policy: name of the policy that made it.
        lanes: ``{(device, stream): tasks}``; stream 0 is the main stream, 1 the sub stream.
        microbatches: micro-batches of one step.
        stages: first and last layer of each stage; empty: stage i is layer i.
        workers: processes that all run these lanes on their own data (data parallel).
        fused_backward: a stage sends its dO only after its dW (PyTorch's backward, GPipe, 1F1B).
        asynchronous: every micro-batch is a step of its own with its own update, and no forward
            waits for an update (PipeDream, LayerPipe).
        barrier: no forward of a step starts before all updates of the step before are done, as in stock
            Horovod; else a layer's forward waits for its own update only.
        priority_lanes: lanes that run whatever is ready, most urgent (first listed) first; all
            others keep their order.
        parts: ``{(kind, stage): shares}`` of tasks that are divided; shares add up to 1.
        after: ``(task, other, steps)``: besides what it needs anyway, the task waits until the other
            one is done, that of ``steps`` steps later.
        recompute: layers whose F runs again before their dO, as part of it, so that less is kept in between.
        predicted_step_s: seconds of one step, None where no costs are known.
        predicted_peak_bytes: most bytes alive at once on one device, None if not computed.
        assumptions: what the predictions hold for, in words; neither compared nor part of the text.

    Raises:
        ScheduleError: a task occurs twice, a dO stands after the dW that needs it in one lane (a
            cycle), or a name or number is malformed.
    """

    mode: str
    policy: str
    lanes: Mapping[Lane, TaskList] = field(default_factory=dict)
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    microbatches: int = 1
    stages: tuple[tuple[int, int], ...] = ()
    workers: int = 1
    fused_backward: bool = False
    asynchronous: bool = False
    barrier: bool = False
    priority_lanes: frozenset[Lane] = frozenset()
    parts: Mapping[tuple[str, int], tuple[float, ...]] = field(default_factory=dict)
    after: tuple[After, ...] = ()
    recompute: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in (self.mode, self.policy):
            if not NAME.fullmatch(name):
                raise ScheduleError(f"mode and policy are single words, got {name!r}")
        lanes = {lane: TaskList(tasks) for lane, tasks in sorted(self.lanes.items())}
        parts = {key: tuple(map(float, shares)) for key, shares in sorted(self.parts.items())}
        object.__setattr__(self, "lanes", MappingProxyType(lanes))
        object.__setattr__(self, "parts", MappingProxyType(parts))
        check_lanes(lanes, self.priority_lanes, self.asynchronous)
        self._check_numbers()
        self._check_stages()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, and copied, as its text: its maps cannot be changed, nor pickled."""
        return _restored, (self.to_text(), self.assumptions)

    def _check_numbers(self) -> None:
        for what in ("microbatches", "workers"):
            if getattr(self, what) < 1:
                raise ScheduleError(f"{what} must be at least 1, got {getattr(self, what)}")
        for lane in self.priority_lanes - self.lanes.keys():
            raise ScheduleError(f"priority lane {lane[0]} {lane[1]} has no tasks")
        for (kind, stage), shares in self.parts.items():
            if len(shares) < 2 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
                raise ScheduleError(
                    f"the parts of {kind}:{stage} must be above 0 and add up to 1, got {shares}"
                )
        self._check_below("microbatch", self.microbatches, "micro-batches")

    def _check_stages(self) -> None:
        expected = 0
        for stage, (first, last) in enumerate(self.stages):
            if first != expected or last < first:
                raise ScheduleError(
                    f"stage {stage} must begin with layer {expected} and hold a layer, got {first}-{last}"
                )
            expected = last + 1
        if self.stages:
            self._check_below("stage", len(self.stages), "stages")
        beyond = [layer for layer in self.recompute if self.stages and layer >= expected]
        if beyond or list(self.recompute) != sorted(set(self.recompute)):
            raise ScheduleError(f"recompute names layers in their order, each once, got {self.recompute}")

    def _check_below(self, field: str, count: int, what: str) -> None:
        for (device, stream), tasks in self.lanes.items():
            beyond = np.flatnonzero(getattr(Fields.of(tasks.codes), field) >= count)
            for task in tasks[beyond[0] : beyond[0] + 1] if len(beyond) else ():
                raise ScheduleError(f"unknown op {task} on lane {device} {stream}: there are {count} {what}")

    def __hash__(self) -> int:
        return hash((self.mode, self.policy, tuple(self.lanes.items())))

    @property
    def tasks(self) -> TaskList:
        """All tasks, lane after lane."""
        return TaskList(np.concatenate([np.zeros(0, np.int64), *(t.codes for t in self.lanes.values())]))

    @property
    def devices(self) -> int:
        """Return how many devices there are: one more than the highest number."""
        return max((device for device, _ in self.lanes), default=0) + 1

    @property
    def device_of_stage(self) -> list[int]:
        """The device of each stage, where a stage has one."""
        devices = {task.stage: device for (device, _), tasks in self.lanes.items() for task in tasks}
        return [devices[stage] for stage in sorted(devices)]

    @property
    def steps_ahead(self) -> int:
        """Return how many steps later the last task is that another one waits for, see ``after``."""
        return max((steps for _, _, steps in self.after), default=0)

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage."""
        if not self.stages:
            return range(stage, stage + 1)
        first, last = self.stages[stage]
        return range(first, last + 1)

    def require(self, tasks: Iterable[Task]) -> None:
        """Raises ScheduleError unless exactly these dO and dW are scheduled; names what is wrong."""
        have, needed = {task for task in self.tasks if task.kind in ("dO", "dW")}, set(tasks)
        missing, unknown = sorted(needed - have), sorted(have - needed)
        if missing:
            raise ScheduleError(f"missing: {_names(missing)} in the training graph and not in the schedule")
        if unknown:
            raise ScheduleError(f"unknown op {_names(unknown)}: the training graph has no such task")

    def to_text(self) -> str:
        """Return the schedule as text; :meth:`from_text` gives an equal schedule back."""
        return write(self)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads :meth:`to_text` text; blank lines and ``#`` comments are skipped.

        Raises ScheduleError with the number of the offending line.
        """
        return cls(**read(text))


def _restored(text: str, assumptions: tuple[str, ...]) -> Schedule:
    return replace(Schedule.from_text(text), assumptions=assumptions)


def _names(tasks: list[Task]) -> str:
    shown = ", ".join(map(str, tasks[:_SHOWN]))
    more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(tasks) == 1 else 'are'}"
