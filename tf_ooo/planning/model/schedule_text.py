"""The text form of a schedule: one line for each entry and each lane."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.task import KINDS, After, Fields, Lane, Task, TaskList, check_lanes

if TYPE_CHECKING:
    from tf_ooo.planning.model.schedule import Schedule

NAME = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_HEADER = "tf_ooo schedule v1"
_INT = "(0|[1-9][0-9]{0,8})"
_LANE = re.compile(rf"lane {_INT} {_INT}( priority)?:", re.ASCII)
_STAGE = re.compile(rf"stage {_INT}: {_INT}-{_INT}", re.ASCII)
_PARTS = re.compile(rf"parts (dO|comm):{_INT}: (.+)", re.ASCII)
_RECOMPUTE = re.compile(rf"recompute ({_INT}(?: {_INT})*)", re.ASCII)
_AFTER = re.compile(r"after (\S+): (\S+)(?: steps ([1-9][0-9]{0,2}))?", re.ASCII)


def write(schedule: Schedule) -> str:
    """Return the schedule as text; :func:`read` gives an equal one back."""
    return "".join(f"{line}\n" for line in _lines(schedule))


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
    """The tasks' texts; with several micro-batches the first one's number is written too."""
    fields = Fields.of(tasks.codes)
    columns = (fields.kind, fields.stage, fields.microbatch, fields.part)
    for kind, stage, batch, part in zip(*(column.tolist() for column in columns), strict=True):
        slot = f".{part}" if part else ""
        yield f"{KINDS[kind]}:{stage}{slot}" + (f"@{batch}" if several else "")


def read(text: str) -> dict[str, Any]:
    """Return the fields of the schedule that :func:`write` wrote.  ScheduleError names the offending line."""
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
        self.lane_lines: dict[Lane, int] = {}
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
        self.lanes[key], self.lane_lines[key] = tasks, number

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
        """A task on two lanes: names the later line."""
        try:
            check_lanes(self.lanes, frozenset(self.lanes))
        except ScheduleError:
            seen: set[int] = set()
            for lane, tasks in self.lanes.items():
                for code in tasks.codes.tolist():
                    if code in seen:
                        message = f"duplicate: {Task.of_code(code)} is scheduled twice"
                        raise ScheduleError(f"line {self.lane_lines[lane]}: {message}") from None
                    seen.add(code)


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
