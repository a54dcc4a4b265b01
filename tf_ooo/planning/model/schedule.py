"""Defines the schedule: which task runs where and in which order, as plain data with a text form."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.task import KINDS, After, Fields, Lane, Task, TaskList, check_lanes, codes_of
from tf_ooo.planning.model.torch_csv import torch_csv

NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_HEADER = "tf_ooo schedule v1"
_INT = "(0|[1-9][0-9]{0,8})"
_LANE = re.compile(rf"lane {_INT} {_INT}( priority)?:", re.ASCII)
_STAGE = re.compile(rf"stage {_INT}: {_INT}-{_INT}", re.ASCII)
_PARTS = re.compile(rf"parts (dO|comm):{_INT}: (.+)", re.ASCII)
_RECOMPUTE = re.compile(rf"recompute ({_INT}(?: {_INT})*)", re.ASCII)
_AFTER = re.compile(r"after (\S+): (\S+)(?: steps ([1-9][0-9]{0,2}))?", re.ASCII)


def _lines(schedule: Schedule) -> Iterator[str]:
    yield _HEADER
    for key, (_, default) in _ENTRIES.items():
        value = getattr(schedule, key)
        if value != default:
            yield f"{key} {'yes' if default is False else value}"
    for number, (first, last) in enumerate(schedule.stages):
        yield f"stage {number}: {first}-{last}"
    if schedule.recompute:
        yield f"recompute {' '.join(map(str, schedule.recompute))}"
    for (kind, stage), shares in schedule.parts.items():
        yield f"parts {kind}:{stage}: {' '.join(map(repr, shares))}"
    for task, other, steps in schedule.after:
        yield f"after {task}: {other}" + (f" steps {steps}" if steps else "")
    for lane, tasks in schedule.lanes.items():
        priority = " priority" if lane in schedule.priority_lanes else ""
        yield " ".join([f"lane {lane[0]} {lane[1]}{priority}:", *_words(tasks, schedule.microbatches > 1)])


def _words(tasks: TaskList, several: bool) -> Iterator[str]:
    """Yield the tasks' texts; with several micro-batches number 0 is written, too."""
    fields = Fields.of(tasks.codes)
    columns = (fields.kind, fields.stage, fields.microbatch, fields.part)
    for kind, stage, batch, part in zip(*(column.tolist() for column in columns), strict=True):
        slot = f".{part}" if part else ""
        yield f"{KINDS[kind]}:{stage}{slot}" + (f"@{batch}" if several else "")


def read(text: str) -> dict[str, Any]:
    """Return the fields of a schedule that was written as text.  ScheduleError names the offending line."""
    reader = _Reader()
    header = False
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split("#", 1)[0].strip()
        try:
            if header and line:
                reader.line(number, line)
            elif line and line != _HEADER:
                raise ScheduleError(f"not a schedule: the first line must be {_HEADER!r}, got {line[:60]!r}")
            header = header or bool(line)
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from None
    if not header:
        raise ScheduleError(f"line 1: missing: the first line must be {_HEADER!r}")
    return reader.fields()


class _Reader:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.lanes: dict[Lane, TaskList] = {}
        self.lane_lines: list[int] = []
        self.priority_lanes: set[Lane] = set()
        self.stages: list[tuple[int, int]] = []
        self.parts: dict[tuple[str, int], tuple[float, ...]] = {}
        self.after: list[After] = []
        self.recompute: tuple[int, ...] = ()

    def line(self, number: int, line: str) -> None:
        entries = {
            "lane": self.lane,
            "stage": self.stage,
            "parts": self.part,
            "after": self.wait,
            "recompute": self.again,
        }
        entries.get(line.split(" ", 1)[0], self.value)(number, line)

    def lane(self, number: int, line: str) -> None:
        match = _match(_LANE, line, "lane DEVICE STREAM: TASK TASK ...", whole=False)
        key = int(match[1]), int(match[2])
        if key in self.lanes:
            raise ScheduleError(f"duplicate lane {key[0]} {key[1]}")
        tasks = TaskList([Task.parse(word) for word in line[match.end() :].split()])
        if match[3]:
            self.priority_lanes.add(key)
        check_lanes({key: tasks}, frozenset(self.priority_lanes), "asynchronous" in self.values)
        self.lanes[key] = tasks
        self.lane_lines.append(number)

    def stage(self, _: int, line: str) -> None:
        match = _match(_STAGE, line, "stage NUMBER: FIRST-LAST")
        if int(match[1]) != len(self.stages):
            raise ScheduleError(f"stage {match[1]}: expected stage {len(self.stages)} here")
        self.stages.append((int(match[2]), int(match[3])))

    def part(self, _: int, line: str) -> None:
        match = _match(_PARTS, line, "parts KIND:STAGE: SHARE SHARE ...")
        key = match[1], int(match[2])
        if key in self.parts:
            raise ScheduleError(f"duplicate parts of {key[0]}:{key[1]}")
        self.parts[key] = tuple(_number("a share", word, float) for word in match[3].split())

    def wait(self, _: int, line: str) -> None:
        match = _match(_AFTER, line, "after TASK: TASK steps N")
        self.after.append((Task.parse(match[1]), Task.parse(match[2]), int(match[3] or 0)))

    def again(self, _: int, line: str) -> None:
        if self.recompute:
            raise ScheduleError("duplicate 'recompute'")
        match = _match(_RECOMPUTE, line, "recompute LAYER LAYER ...")
        self.recompute = tuple(map(int, match[1].split()))

    def value(self, _: int, line: str) -> None:
        key, _space, value = line.partition(" ")
        if key not in _ENTRIES:
            raise ScheduleError(
                f"unknown entry {key!r}; expected {', '.join(_ENTRIES)}, stage, recompute, parts, after, "
                "or 'lane D S:'"
            )
        if key in self.values:
            raise ScheduleError(f"duplicate {key!r}")
        self.values[key] = _ENTRIES[key][0](key, value)

    def fields(self) -> dict[str, Any]:
        for key in ("mode", "policy"):
            if key not in self.values:
                raise ScheduleError(f"missing: there is no {key!r} line")
        self._check_duplicates()
        return {
            **self.values,
            "lanes": self.lanes,
            "stages": tuple(self.stages),
            "priority_lanes": frozenset(self.priority_lanes),
            "parts": self.parts,
            "after": tuple(self.after),
            "recompute": self.recompute,
        }

    def _check_duplicates(self) -> None:
        """Refuse a task on two lanes, naming the later line."""
        codes = codes_of(self.lanes)
        order = np.argsort(codes, kind="stable")
        again = order[1:][codes[order[1:]] == codes[order[:-1]]]
        if len(again):
            lines = np.repeat(self.lane_lines, [len(tasks) for tasks in self.lanes.values()])
            task = Task.of_code(int(codes[again.min()]))
            raise ScheduleError(f"line {lines[again.min()]}: duplicate: {task} is scheduled twice")


def _match(pattern: re.Pattern[str], line: str, form: str, whole: bool = True) -> re.Match[str]:
    match = pattern.fullmatch(line) if whole else pattern.match(line)
    if match is None:
        raise ScheduleError(f"malformed: expected {form!r}, got {line[:60]!r}")
    return match


def _word(key: str, value: str) -> str:
    if not NAME.fullmatch(value):
        raise ScheduleError(f"{key} must be a single word, got {value!r}")
    return value


def _number(key: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        number = kind(value)
    except ValueError:
        raise ScheduleError(f"{key} is not a number: {value!r}") from None
    if not 0 <= number < float("inf"):
        raise ScheduleError(f"{key} must be finite and not negative, got {value!r}")
    return number


def _yes(key: str, value: str) -> bool:
    if value != "yes":
        raise ScheduleError(f"{key}: expected 'yes' (leave the line out for no), got {value!r}")
    return True


_whole, _seconds = functools.partial(_number, kind=int), functools.partial(_number, kind=float)
# Each entry is read like this, and is this where it is left out.
_ENTRIES: dict[str, tuple[Callable[[str, str], Any], Any]] = {
    "mode": (_word, ""),
    "policy": (_word, ""),
    "microbatches": (_whole, 1),
    "workers": (_whole, 1),
    "fused_backward": (_yes, False),
    "asynchronous": (_yes, False),
    "barrier": (_yes, False),
    "predicted_step_s": (_seconds, None),
    "predicted_peak_bytes": (_whole, None),
}


__all__ = ["KINDS", "After", "Lane", "Schedule", "Task", "TaskList"]

_SHOWN = 5


@dataclass(frozen=True)
class Schedule:
    """Holds an order of tasks for each (device, stream), for one step, which is repeated.

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
        """Pickle and copy the schedule as its text: its maps cannot be changed, nor pickled."""
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
        """Return all tasks, lane after lane."""
        return TaskList(codes_of(self.lanes))

    @property
    def devices(self) -> int:
        """Return the number of devices: one more than the highest device number."""
        return max((device for device, _ in self.lanes), default=0) + 1

    @property
    def device_of_stage(self) -> list[int]:
        """Return the device of each stage, where a stage has one."""
        devices = {task.stage: device for (device, _), tasks in self.lanes.items() for task in tasks}
        return [devices[stage] for stage in sorted(devices)]

    @property
    def steps_ahead(self) -> int:
        """Return by how many steps the latest task is ahead that another one waits for, see ``after``."""
        return max((steps for _, _, steps in self.after), default=0)

    def layers_of(self, stage: int) -> range:
        first, last = self.stages[stage] if self.stages else (stage, stage)
        return range(first, last + 1)

    def require(self, tasks: Iterable[Task]) -> None:
        """Raise ScheduleError unless exactly these dO and dW are scheduled; it names the difference."""
        have, needed = {task for task in self.tasks if task.kind in ("dO", "dW")}, set(tasks)
        missing, unknown = sorted(needed - have), sorted(have - needed)
        if missing:
            raise ScheduleError(f"missing: {_names(missing)} in the training graph and not in the schedule")
        if unknown:
            raise ScheduleError(f"unknown op {_names(unknown)}: the training graph has no such task")

    def to_text(self) -> str:
        """Return the schedule as text; :meth:`from_text` gives an equal schedule back."""
        return "".join(f"{line}\n" for line in _lines(self))

    def to_torch_csv(self) -> str:
        """Return the CSV file that ``torch.distributed.pipelining`` loads; ScheduleError: torch cannot."""
        return torch_csv(self)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read :meth:`to_text` text; blank lines and ``#`` comments are skipped.

        Raises ScheduleError with the number of the offending line.
        """
        return cls(**read(text))


def _restored(text: str, assumptions: tuple[str, ...]) -> Schedule:
    return replace(Schedule.from_text(text), assumptions=assumptions)


def _names(tasks: list[Task]) -> str:
    shown = ", ".join(map(str, tasks[:_SHOWN]))
    more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(tasks) == 1 else 'are'}"
