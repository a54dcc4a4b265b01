"""Defines the course of a simulated (or measured) run: when each task ran where, and the memory it took."""

from __future__ import annotations

import dataclasses
import html
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.schedule import Lane, Schedule, TaskList
from tf_ooo.planning.model.task import Bools, Fields, Floats, Ints, Task

STEPS_TO_STEADY = 4


@dataclass(frozen=True, order=True)
class Event:
    """Describes one task that ran; seconds since the start of the run."""

    start_s: float
    end_s: float
    device: int
    stream: int
    task: Task
    step: int = 0


@dataclass(frozen=True)
class Message:
    """Describes one transfer, and when it occupied the link from one device to another."""

    start_s: float
    end_s: float
    source: int
    target: int
    size_bytes: float


@dataclass(frozen=True, eq=False)
class MessageColumns:
    """Holds transfers, one row each, and when each occupies the link between two devices."""

    source: Ints = field(default_factory=lambda: np.zeros(0, int))
    target: Ints = field(default_factory=lambda: np.zeros(0, int))
    size_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    start_s: Floats = field(default_factory=lambda: np.zeros(0))
    end_s: Floats = field(default_factory=lambda: np.zeros(0))

    def of(self, rows: Bools, since_s: float = 0.0) -> MessageColumns:
        """Return these rows, with seconds since ``since_s``."""
        start_s, end_s = self.start_s[rows] - since_s, self.end_s[rows] - since_s
        return MessageColumns(self.source[rows], self.target[rows], self.size_bytes[rows], start_s, end_s)


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Holds times of all tasks of all steps.

    Attributes:
        schedule: what ran.
        start_s, end_s: float64 (steps, tasks), in the order of ``schedule.tasks``.
        memory: a curve for each device; empty where it is not known.
        message_columns: what was sent between devices.
        measured_busy_s: for each device, seconds in which its ops ran, if measured one by one; empty: a
            device is busy whenever a task runs.
        fullest_s: least seconds of the tasks that share a device, or the cores of a machine; 0: none do.
    """

    schedule: Schedule
    start_s: Floats
    end_s: Floats
    memory: Sequence[MemoryCurve] = ()
    message_columns: MessageColumns = field(default_factory=MessageColumns)
    _repeat: Callable[[int], Timeline] | None = None
    measured_busy_s: Sequence[float] = ()
    fullest_s: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.start_s)

    @cached_property
    def makespan_s(self) -> float:
        """Return seconds until the last task of the last step is done."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def steady_step_s(self) -> float:
        """Return seconds between the ends of two steps, once steps repeat.

        An asynchronous schedule has a step for each micro-batch: the mean distance of the middle half of its
        micro-batches, but no less than the work for each of the busiest lane or of shared cores. (While idler
        lanes catch up, and when no more micro-batches come in, micro-batches end faster than they can in the
        long run.)
        """
        if self.schedule.asynchronous:
            return self._microbatch_period_s()
        # Tasks of the last steps that wait for a step that is not there end too early to count.
        whole = self.steps - self.schedule.steps_ahead
        if whole < STEPS_TO_STEADY:
            more = STEPS_TO_STEADY + self.schedule.steps_ahead
            return self.makespan_s if self._repeat is None else self._repeat(more).steady_step_s
        ends_s = self.end_s[:whole].max(axis=1)
        half = whole // 2
        return float(ends_s[-1] - ends_s[half - 1]) / (whole - half)

    def _microbatch_period_s(self) -> float:
        done_s = np.zeros(self.schedule.microbatches)
        np.maximum.at(done_s, Fields.of(self.schedule.tasks.codes).microbatch, self.end_s[0])
        done_s.sort()
        first, last = len(done_s) // 4, len(done_s) * 3 // 4
        if last - first < 1:
            return self.makespan_s / len(done_s)
        took_s = self.end_s[0] - self.start_s[0]
        busiest_s = max(float(took_s[piece].sum()) for _, piece in self.lane_slices())
        least_s = max(busiest_s, self.fullest_s / self.steps) / len(done_s)
        return max(float(done_s[last] - done_s[first]) / (last - first), least_s)

    @cached_property
    def busy_s(self) -> list[float]:
        """Return for each device the seconds in which one of its streams computes (comm does not)."""
        if self.measured_busy_s:
            return list(self.measured_busy_s)
        return [self._busy_s(device) for device in range(self.schedule.devices)]

    def _busy_s(self, device: int) -> float:
        lanes = self.schedule.lanes
        places = [
            piece
            for lane, piece in self.lane_slices()
            if lane[0] == device and not any(task.kind == "comm" for task in lanes[lane][:1])
        ]
        if len(places) == 1:
            return float((self.end_s[:, places[0]] - self.start_s[:, places[0]]).sum())
        starts = np.concatenate([np.zeros(0), *(self.start_s[:, p].ravel() for p in places)])
        ends = np.concatenate([np.zeros(0), *(self.end_s[:, p].ravel() for p in places)])
        order = np.argsort(starts)
        reached = np.maximum.accumulate(np.concatenate([[0.0], ends[order]]))
        return float(np.maximum(0, ends[order] - np.maximum(starts[order], reached[:-1])).sum())

    def lane_slices(self) -> Iterator[tuple[Lane, slice]]:
        """Yield the columns of each lane's tasks."""
        at = 0
        for lane, tasks in self.schedule.lanes.items():
            yield lane, slice(at, at + len(tasks))
            at += len(tasks)

    @cached_property
    def bubble_fraction(self) -> float:
        """Return the share of all devices' time in which nothing runs, from the start to the makespan."""
        total_s = self.makespan_s * self.schedule.devices
        return max(0.0, 1 - sum(self.busy_s) / total_s) if total_s else 0.0

    @cached_property
    def steady_bubble_fraction(self) -> float:
        """Return the share of all devices' time in which nothing runs, once steps repeat.

        It is that of the last of several steps. For an asynchronous schedule begin and end are left out, when
        devices wait for the first micro-batches or have run out of them.
        """
        if not self.schedule.asynchronous:
            return self.one_step().bubble_fraction
        total_s = self.steady_step_s * self.schedule.microbatches * self.schedule.devices
        return max(0.0, 1 - sum(self.busy_s) / total_s) if total_s else 0.0

    @property
    def peak_bytes(self) -> list[int]:
        """Return the most bytes alive at once, for each device."""
        return [curve.peak_bytes for curve in self.memory]

    @property
    def events(self) -> list[Event]:
        """Return all tasks with their times, the earliest first (objects: slow for millions)."""
        return sorted(self.iter_events())

    def iter_events(self) -> Iterator[Event]:
        """Yield all tasks with their times, lane after lane and step after step."""
        for step in range(self.steps):
            starts, ends = self.start_s[step].tolist(), self.end_s[step].tolist()
            for (device, stream), piece in self.lane_slices():
                tasks = self.schedule.lanes[device, stream]
                for task, start_s, end_s in zip(tasks, starts[piece], ends[piece], strict=True):
                    yield Event(start_s, end_s, device, stream, task, step)

    @property
    def messages(self) -> list[Message]:
        """Return all transfers between devices that took time, the earliest first."""
        sent = self.message_columns
        columns = (sent.start_s, sent.end_s, sent.source, sent.target, sent.size_bytes)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return sorted((Message(*row) for row in rows), key=lambda message: message.start_s)

    @property
    def message_bytes(self) -> float:
        """Return the bytes sent between devices in all steps together."""
        return float(self.message_columns.size_bytes.sum())

    def one_step(self) -> Timeline:
        """Return the last of several steps, from its first task on; for an asynchronous schedule a round.

        The round is from the middle: each task runs once, each for another micro-batch.
        """
        if self.schedule.asynchronous:
            return _round(self)
        if self.steps == 1:
            return self
        first_s = float(self.start_s[-1].min(initial=np.inf))
        return _window(self, self.schedule, self.start_s[-1:] - first_s, self.end_s[-1:] - first_s, first_s)

    def save_html(self, path: str | os.PathLike[str], measured: Timeline | None = None) -> None:
        """Write one self-contained page: a Gantt chart of each device and stream, with the memory below.

        Args:
            path: the file to write.
            measured: a measured timeline, to show beside this predicted one.
        """
        from tf_ooo.planning.pictures.page import render, write_page  # noqa: PLC0415 - needs plotly

        write_page(path, render(self, measured))

    def save_trace(self, path: str | os.PathLike[str], layers: Mapping[int, str] | None = None) -> None:
        """Write a Chrome/Perfetto trace (chrome://tracing, ui.perfetto.dev); ``layers``: names by number."""
        from tf_ooo.planning.pictures.trace import save_trace  # noqa: PLC0415

        save_trace(self, path, layers=layers)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Write a picture of the Gantt chart and the memory."""
        from tf_ooo.planning.pictures.png import save_png  # noqa: PLC0415 - needs matplotlib

        save_png(self, path)

    def __repr__(self) -> str:
        """Return a short text: :meth:`save_html` draws the timeline."""
        tasks, schedule = f"{len(self.schedule.tasks):,} tasks", self.schedule
        return (
            f"Timeline({schedule.policy}, {schedule.devices} devices, {self.steps} x {tasks}, "
            f"makespan {self.makespan_s:.3g} s, bubble {self.bubble_fraction:.0%})"
        )

    def _repr_html_(self) -> str:
        """Return the Gantt chart, for notebooks."""
        from tf_ooo.planning.pictures.png import image  # noqa: PLC0415 - needs matplotlib

        return f"<p>{html.escape(repr(self))}</p>{image(self)}"


def _round(timeline: Timeline) -> Timeline:
    """Cut out the steady state: from the middle micro-batch's first task on, for one micro-batch's time."""
    schedule, events = timeline.schedule, list(timeline.iter_events())
    middle = [event.start_s for event in events if event.task.microbatch == schedule.microbatches // 2]
    first_s = min(middle, default=0.0)
    until_s = first_s + timeline.steady_step_s
    lanes: dict[Lane, list[Task]] = {lane: [] for lane in schedule.lanes}
    times: dict[Lane, list[tuple[float, float]]] = {lane: [] for lane in schedule.lanes}
    for event in events:
        lane, task = (event.device, event.stream), dataclasses.replace(event.task, microbatch=0)
        if first_s <= event.start_s < until_s and task not in lanes[lane]:
            lanes[lane].append(task)
            times[lane].append((event.start_s, event.end_s))
    columns = np.array([pair for lane in lanes for pair in times[lane]]).reshape(-1, 2) - first_s
    of_round = dataclasses.replace(
        schedule,
        lanes={lane: TaskList(tasks) for lane, tasks in lanes.items()},
        microbatches=1,
        asynchronous=False,
        priority_lanes=frozenset(lanes),  # a dW of an earlier micro-batch may stand in front of its dO
        parts={},
        after=(),
    )
    return _window(timeline, of_round, columns[:, 0][None], columns[:, 1][None], first_s)


def _window(
    timeline: Timeline, schedule: Schedule, start_s: Floats, end_s: Floats, first_s: float
) -> Timeline:
    """Return these tasks, with the memory and the messages during their time."""
    last_s = first_s + float(end_s.max(initial=0.0))
    sent = timeline.message_columns
    return dataclasses.replace(
        timeline,
        schedule=schedule,
        start_s=start_s,
        end_s=end_s,
        memory=list(_curves(timeline, first_s, last_s)),
        message_columns=sent.of((sent.start_s >= first_s) & (sent.start_s < last_s), first_s),
        _repeat=None,
    )


def _curves(timeline: Timeline, first_s: float, last_s: float) -> Iterator[MemoryCurve]:
    """Yield for each curve the bytes alive at the begin, and each change until the end."""
    for curve in timeline.memory:
        begin, end = np.searchsorted(curve.time_s, (first_s, last_s), side="right")
        alive = np.concatenate([[0.0], curve.alive_bytes])[begin : end + 1]
        yield MemoryCurve(np.concatenate([[0.0], curve.time_s[begin:end] - first_s]), alive)
