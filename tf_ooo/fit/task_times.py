"""Finds when each task of a step really ran, from what TensorFlow's profiler has seen of its ops."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.measured import TaskTime, TaskTimes

Span = tuple[float, float]  # (begin, end) in seconds
_NEGLIGIBLE = 0.02
_HANDING_ON = frozenset(
    ("Cast", "ExpandDims", "Identity", "IteratorGetNext", "Pack", "ReadVariableOp", "Reshape", "Shape")
    + ("Squeeze", "StridedSlice")
)
_UPDATES = re.compile(r":(Assign|Resource(Apply|Scatter))")


def task_times(
    events: Iterable[TracedEvent], tasks: Mapping[str, Task], late_gradients: bool = False
) -> dict[Task, TaskTime]:
    """Return when each task ran.

    Ops at a task's ends that take next to nothing do not count: what waits for no message runs early.  Nor do
    those that only hand weights and labels on, unless the task has no others.  An op of a gradient that ran
    before its own forward pass began needs nothing of it, and does not count either; a gradient of such ops
    alone is left out.  ``late_gradients``: they are an earlier batch's, and may come first.
    """
    spans: dict[Task, list[Span]] = {}
    handing_on: dict[Task, list[Span]] = {}
    for event in events:
        task = _task_of(event, tasks)
        if task is not None:
            early = task.kind == "F" and event.label.rpartition(":")[2] in _HANDING_ON
            (handing_on if early else spans).setdefault(task, []).append(span_of(event))
    times = {task: _extent(sorted(each)) for task, each in {**handing_on, **spans}.items()}
    return times if late_gradients else dict(_after_forward(times, spans))


def _after_forward(times: TaskTimes, spans: Mapping[Task, list[Span]]) -> Iterator[tuple[Task, TaskTime]]:
    for task, extent in times.items():
        backward = task.kind in ("dO", "dW")
        forward = times.get(dataclasses.replace(task, kind="F", part=0)) if backward else None
        if forward is None or extent.begin_s >= forward.begin_s:
            yield task, extent
            continue
        after = [span for span in spans[task] if span[0] >= forward.begin_s]
        if after:
            yield task, _extent(sorted(after))


def _extent(spans: Sequence[Span]) -> TaskTime:
    """First begin and last end, less what is in front of and behind all but a small share of the time."""
    ops_s = length_s(spans)

    def small(ordered: Sequence[Span]) -> int:
        before_s = itertools.accumulate(end_s - begin_s for begin_s, end_s in ordered)
        return sum(seconds < _NEGLIGIBLE * ops_s for seconds in before_s)

    by_end = sorted(spans, key=lambda span: -span[1])
    return TaskTime(spans[small(spans)][0], by_end[small(by_end)][1], ops_s)


def _task_of(event: TracedEvent, tasks: Mapping[str, Task]) -> Task | None:
    task = tasks.get(event.label.partition(":")[0])
    if task is not None and task.kind == "U" and not _UPDATES.search(event.label):
        return None  # constants and the like of an update are made at any time
    return task


def busy_seconds(events: Iterable[TracedEvent], tasks: Mapping[str, Task], schedule: Schedule) -> list[float]:
    """Return for each device the seconds in which at least one op of a task ran.

    Between two ops of one task a device may be idle too, where it waits for a message.  What the schedule
    does not name is on its first device.
    """
    device_of = {task: device for (device, _), lane in schedule.lanes.items() for task in lane}
    first = min(schedule.lanes, default=(0, 0))[0]
    spans: list[list[Span]] = [[] for _ in range(schedule.devices)]
    for event in events:
        task = _task_of(event, tasks)
        if task is not None and task.kind != "comm":
            spans[device_of.get(task, first)].append(span_of(event))
    return [length_s(busy_spans(of_device)) for of_device in spans]


def last_execution(events: Sequence[TracedEvent], tasks: Mapping[str, Task]) -> list[TracedEvent]:
    """The events of ops of tasks; of a graph that ran several times (``steps_per_execution``) the last.

    On a GPU an op's kernels stand for it, not their launch.
    """
    by_op: defaultdict[tuple[str, str, bool], list[TracedEvent]] = defaultdict(list)
    for event in events:
        name = event.label.partition(":")[0]
        if name in tasks and not event.line.startswith("tf_data"):
            by_op[name, event.label, event.plane.startswith("/device:GPU")].append(event)
    on_gpu = {name for name, _, gpu in by_op if gpu}
    kept = {key: ran for key, ran in by_op.items() if key[2] or key[0] not in on_gpu}
    runs = min(map(len, kept.values()), default=1)
    last: list[TracedEvent] = []
    for ran in kept.values():
        ran.sort(key=lambda event: event.begin_s)
        last += ran[-(len(ran) // runs) :]
    return last


def span_of(event: TracedEvent) -> Span:
    """Return begin and end of an event of TensorFlow's profiler."""
    return event.begin_s, event.begin_s + event.duration_s


def busy_spans(spans: Iterable[Span]) -> list[Span]:
    """Return when at least one of them ran, in order and apart from each other."""
    busy: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if busy and begin_s <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(end_s, busy[-1][1]))
        else:
            busy.append((begin_s, end_s))
    return busy


def length_s(spans: Iterable[Span]) -> float:
    """Return seconds of all together."""
    return sum(end_s - begin_s for begin_s, end_s in spans)
