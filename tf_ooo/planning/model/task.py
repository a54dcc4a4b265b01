"""Defines tasks, compact sequences of them (for tens of millions), and the rules that every lane keeps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tf_ooo.errors import ScheduleError

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


KINDS = ("F", "dO", "dW", "comm", "U")
KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
# A task is 59 bits: kind, part, stage, micro-batch.
_PART_AT, _STAGE_AT, _KIND_AT = 44, 24, 56
MAX_MICROBATCH, MAX_STAGE, MAX_PART = (1 << 24) - 1, (1 << 20) - 1, (1 << 12) - 1
_NUMBER = "(0|[1-9][0-9]{0,8})"
_TASK = re.compile(rf"(F|dO|dW|comm|U):{_NUMBER}(?:\.{_NUMBER})?(?:@{_NUMBER})?", re.ASCII)


def replica_of_part(microbatches: int, replicas: int) -> tuple[int, ...]:
    """Return the replica that each micro-batch of a step passes through: neighbours take the same.

    With fewer micro-batches than replicas the last replicas have none.
    """
    shares = [microbatches // replicas + (number < microbatches % replicas) for number in range(replicas)]
    return tuple(number for number, share in enumerate(shares) for _ in range(share))


@dataclass(frozen=True, order=True)
class Task:
    """Stands for all ops of one kind of one stage, for one micro-batch; its text is ``dW:3@5``.

    A stage is a group of layers; without pipelining it is one layer.  ``part`` numbers the pieces of
    a task that is divided: slices of a communication, or LayerPipe's two halves of a dO (``dO:3.1``).
    """

    kind: str
    stage: int
    microbatch: int = 0
    part: int = 0

    def __str__(self) -> str:
        part = f".{self.part}" if self.part else ""
        return f"{self.kind}:{self.stage}{part}" + (f"@{self.microbatch}" if self.microbatch else "")

    @classmethod
    def parse(cls, text: str) -> Task:
        """Return the task of a text like ``dO:3@5``; ScheduleError names a text that is not one."""
        match = _TASK.fullmatch(text)
        if match is None:
            expected = (
                ", ".join(KINDS) + ", then ':' and a stage, and '@' and a micro-batch if there are several"
            )
            raise ScheduleError(f"unknown op {text!r}; expected {expected}")
        task = cls(match[1], int(match[2]), int(match[4] or 0), int(match[3] or 0))
        task.code()
        return task

    def code(self) -> int:
        """Return the task as an int, the inverse of :meth:`of_code`. ScheduleError: a number is too large."""
        for what, value, limit in (
            ("stage", self.stage, MAX_STAGE),
            ("micro-batch", self.microbatch, MAX_MICROBATCH),
            ("part", self.part, MAX_PART),
        ):
            if not 0 <= value <= limit:
                raise ScheduleError(f"{self}: {what} must be within 0..{limit}, got {value}")
        if self.kind not in KIND_NUMBER:
            raise ScheduleError(f"unknown op {self}; expected {', '.join(KINDS)}")
        kind = KIND_NUMBER[self.kind] << _KIND_AT
        return kind | self.part << _PART_AT | self.stage << _STAGE_AT | self.microbatch

    @classmethod
    def of_code(cls, code: int) -> Task:
        kind, part = KINDS[code >> _KIND_AT], code >> _PART_AT & MAX_PART
        return cls(kind, code >> _STAGE_AT & MAX_STAGE, code & MAX_MICROBATCH, part)


def encode(kind: str, stage: ArrayLike, microbatch: ArrayLike = 0) -> Ints:
    """Return codes of many tasks at once: ints or arrays that broadcast."""
    stages, batches = np.asarray(stage, np.int64), np.asarray(microbatch, np.int64)
    return (KIND_NUMBER[kind] << _KIND_AT) | stages << _STAGE_AT | batches


@dataclass(frozen=True)
class Fields:
    """Holds the fields of many codes, as arrays; ``kind`` holds indices into KINDS."""

    kind: Ints
    stage: Ints
    microbatch: Ints
    part: Ints

    @classmethod
    def of(cls, codes: Ints) -> Fields:
        return cls(
            (codes >> _KIND_AT).astype(np.int8),
            (codes >> _STAGE_AT & MAX_STAGE).astype(np.int32),
            (codes & MAX_MICROBATCH).astype(np.int32),
            (codes >> _PART_AT & MAX_PART).astype(np.int32),
        )


class TaskList(Sequence[Task]):
    """Represents an immutable sequence of tasks in 8 bytes each; equal to a tuple of the same tasks."""

    __slots__ = ("codes",)

    def __init__(self, tasks: Iterable[Task] | Ints) -> None:
        if isinstance(tasks, TaskList):
            codes = tasks.codes
        elif isinstance(tasks, np.ndarray):
            codes = np.array(tasks, np.int64)
        else:
            codes = np.array([task.code() for task in tasks], np.int64)
        codes.setflags(write=False)
        self.codes: NDArray[np.int64] = codes

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, place: int) -> Task: ...

    @overload
    def __getitem__(self, place: slice) -> TaskList: ...

    def __getitem__(self, place: int | slice) -> Task | TaskList:
        if isinstance(place, slice):
            return TaskList(self.codes[place])
        return Task.of_code(int(self.codes[place]))

    def __iter__(self) -> Iterator[Task]:
        return map(Task.of_code, self.codes.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TaskList):
            return np.array_equal(self.codes, other.codes)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(self.codes.tobytes())

    def __repr__(self) -> str:
        shown = " ".join(map(str, self[:20]))
        return f"TaskList({shown}{' ...' if len(self) > 20 else ''})"


# The tasks of a (device, stream) in their order.
Lane = tuple[int, int]
# (task, other, steps): the task waits for the other one of so many steps later.
After = tuple[Task, Task, int]


def codes_of(lanes: Mapping[Lane, TaskList]) -> Ints:
    """Return the codes of all tasks, lane after lane."""
    return np.concatenate([np.zeros(0, np.int64), *(tasks.codes for tasks in lanes.values())])


def check_lanes(
    lanes: Mapping[Lane, TaskList], priority_lanes: frozenset[Lane] = frozenset(), asynchronous: bool = False
) -> None:
    """Raise ScheduleError where a task occurs twice, or stands after one that needs it."""
    codes = np.sort(codes_of(lanes))
    twice = np.flatnonzero(codes[1:] == codes[:-1])
    if len(twice):
        raise ScheduleError(f"duplicate: {Task.of_code(int(codes[twice[0]]))} is scheduled twice")
    for lane, tasks in lanes.items():
        if lane not in priority_lanes:
            _check_causal(lane, tasks, asynchronous)


def _check_causal(lane: Lane, tasks: TaskList, asynchronous: bool) -> None:
    """Check that F, dO, dW, comm, U come in this order; a step's single tasks come after all dW."""
    fields = Fields.of(tasks.codes)
    each = fields.stage.astype(np.int64) << 24 | fields.microbatch
    last = KIND_NUMBER["U"] if asynchronous else KIND_NUMBER["dW"]
    checks = [(fields.kind <= last, each)]
    if not asynchronous:
        checks.append((fields.kind >= KIND_NUMBER["dW"], fields.stage.astype(np.int64)))
    for chosen, key in checks:
        places = np.flatnonzero(chosen)
        order = places[np.argsort(key[places], kind="stable")]
        falls = (key[order][1:] == key[order][:-1]) & (fields.kind[order][1:] < fields.kind[order][:-1])
        for at in np.flatnonzero(falls)[:1]:
            before, after = tasks[int(order[at])], tasks[int(order[at + 1])]
            raise ScheduleError(
                f"cycle: {after} stands after {before}, which needs it, on lane {lane[0]} {lane[1]}"
            )
