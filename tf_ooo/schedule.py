"""The schedule: which task runs where and in which order, as plain data with a text form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tf_ooo.errors import ScheduleError

KINDS = ("F", "dO", "dW", "U")
Lane = tuple[int, int]
_HEADER = "tf_ooo schedule v1"
_TASK = re.compile(r"(F|dO|dW|U):(0|[1-9][0-9]{0,8})", re.ASCII)
_LANE = re.compile(r"lane (0|[1-9][0-9]{0,8}) (0|[1-9][0-9]{0,8}):", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)


@dataclass(frozen=True, order=True)
class Task:
    """All ops of one kind that belong to one layer; its text is ``dW:3``."""

    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.layer}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """The task of a text like ``dO:3``; ScheduleError names a text that is none."""
        match = _TASK.fullmatch(text)
        if match is None:
            raise ScheduleError(f"unknown op {text!r}; expected {', '.join(KINDS)}, then ':' and a layer")
        return cls(match[1], int(match[2]))


@dataclass(frozen=True)
class Schedule:
    """An order of tasks for each (device, stream).

    Attributes:
        mode: single_device.
        policy: name of the policy that made it.
        lanes: ``{(device, stream): tasks}``; stream 0 is the main stream, 1 the sub stream.
        predicted_step_s: seconds of one step, None where no costs are known.
        predicted_peak_bytes: most bytes alive at once when ops run one at a time, None if not computed.

    Raises:
        ScheduleError: a task occurs twice, a dO stands after the dW that needs it in one lane (a
            cycle), or a name is malformed.
    """

    mode: str
    policy: str
    lanes: Mapping[Lane, tuple[Task, ...]] = field(default_factory=dict)
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in (self.mode, self.policy):
            if not _NAME.fullmatch(name):
                raise ScheduleError(f"mode and policy are single words, got {name!r}")
        lanes = {lane: tuple(tasks) for lane, tasks in sorted(self.lanes.items())}
        object.__setattr__(self, "lanes", MappingProxyType(lanes))
        _check_unique(lanes)
        for lane, tasks in lanes.items():
            _check_causal(lane, tasks)

    def __hash__(self) -> int:
        return hash(self.to_text())

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, lane after lane."""
        return tuple(task for tasks in self.lanes.values() for task in tasks)

    def require(self, tasks: set[Task]) -> None:
        """Raises ScheduleError unless exactly these tasks are scheduled; names what is wrong."""
        have = set(self.tasks)
        for task in sorted(tasks - have):
            raise ScheduleError(f"missing: {task} is in the training graph and not in the schedule")
        for task in sorted(have - tasks):
            raise ScheduleError(f"unknown op {task}: the training graph has no such task")

    def to_text(self) -> str:
        """The schedule as text; :meth:`from_text` gives an equal schedule back."""
        lines = [_HEADER, f"mode {self.mode}", f"policy {self.policy}"]
        if self.predicted_step_s is not None:
            lines.append(f"predicted_step_s {self.predicted_step_s!r}")
        if self.predicted_peak_bytes is not None:
            lines.append(f"predicted_peak_bytes {self.predicted_peak_bytes}")
        for (device, stream), tasks in self.lanes.items():
            lines.append(" ".join([f"lane {device} {stream}:", *map(str, tasks)]))
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads :meth:`to_text` text; blank lines and ``#`` comments are skipped.

        Raises ScheduleError with the number of the offending line.
        """
        return _Reader().read(text)


class _Reader:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lanes: dict[Lane, tuple[Task, ...]] = {}

    def read(self, text: str) -> Schedule:
        header = False
        for number, raw in enumerate(text.split("\n"), 1):
            line = raw.split("#", 1)[0].strip()
            try:
                if line and not header:
                    header = _check_header(line)
                elif line:
                    self.line(line)
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from None
        if not header:
            raise ScheduleError(f"line 1: missing: the first line must be {_HEADER!r}")
        return self.schedule()

    def line(self, line: str) -> None:
        lane = _LANE.match(line)
        if lane is None:
            self.value(line)
            return
        key = int(lane[1]), int(lane[2])
        if key in self.lanes:
            raise ScheduleError(f"duplicate lane {key[0]} {key[1]}")
        tasks = tuple(Task.parse(word) for word in line[lane.end() :].split())
        self.lanes[key] = tasks
        _check_unique(self.lanes)
        _check_causal(key, tasks)

    def value(self, line: str) -> None:
        key, _, value = line.partition(" ")
        if key not in ("mode", "policy", "predicted_step_s", "predicted_peak_bytes"):
            raise ScheduleError(f"unknown entry {key!r}; expected mode, policy, predicted_*, or 'lane D S:'")
        if key in self.values:
            raise ScheduleError(f"duplicate {key!r}")
        if key in ("mode", "policy") and not _NAME.fullmatch(value):
            raise ScheduleError(f"{key} must be a single word, got {value!r}")
        if key.startswith("predicted"):
            _number(key, value)
        self.values[key] = value

    def schedule(self) -> Schedule:
        for key in ("mode", "policy"):
            if key not in self.values:
                raise ScheduleError(f"missing: there is no {key!r} line")
        seconds, peak = self.values.get("predicted_step_s"), self.values.get("predicted_peak_bytes")
        return Schedule(
            mode=self.values["mode"],
            policy=self.values["policy"],
            lanes=self.lanes,
            predicted_step_s=None if seconds is None else float(seconds),
            predicted_peak_bytes=None if peak is None else int(peak),
        )


def _check_header(line: str) -> bool:
    if line != _HEADER:
        raise ScheduleError(f"not a schedule: the first line must be {_HEADER!r}, got {line[:60]!r}")
    return True


def _number(key: str, value: str) -> None:
    try:
        number = int(value) if key.endswith("_bytes") else float(value)
    except ValueError:
        raise ScheduleError(f"{key} is not a number: {value!r}") from None
    if not 0 <= number < float("inf"):
        raise ScheduleError(f"{key} must be finite and not negative, got {value!r}")


def _check_unique(lanes: Mapping[Lane, tuple[Task, ...]]) -> None:
    seen: set[Task] = set()
    for tasks in lanes.values():
        for task in tasks:
            if task in seen:
                raise ScheduleError(f"duplicate: {task} is scheduled twice")
            seen.add(task)


def _check_causal(lane: Lane, tasks: tuple[Task, ...]) -> None:
    """F, dO, dW, U of one layer depend on each other in this order."""
    latest: dict[int, Task] = {}
    for task in tasks:
        before = latest.get(task.layer)
        if before is not None and KINDS.index(before.kind) > KINDS.index(task.kind):
            raise ScheduleError(
                f"cycle: {task} stands after {before}, which needs it, on lane {lane[0]} {lane[1]}"
            )
        latest[task.layer] = task
