"""Records a few steps of a fit with TensorFlow's profiler, to show when tasks really ran, beside the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tf_ooo.compat import nests, tf_profiler
from tf_ooo.compat.tf_profiler import TracedEvent
from tf_ooo.errors import BackendError
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.measured import (
    TaskTime,
    TaskTimes,
    against_plan,
    between_neighbours,
    measured_timeline,
    one_by_one,
)
from tf_ooo.report.parts import Recorded
from tf_ooo.report.report import Report

_MARGIN_S = 0.4


@dataclass(frozen=True)
class Traced:
    """Holds the outputs and seconds of a call, and the profile of what ran in it.

    ``events`` are keyed by the worker's address, ``""`` for this process; ``files`` are the profiler's own,
    by their paths below a folder of logs.  ``failed``: why there are only the outputs.
    """

    outputs: Any
    events: Mapping[str, Sequence[TracedEvent]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""


def run_traced(run: Callable[[], Any], addresses: Sequence[str], expected_s: float) -> Traced:
    """Call ``run`` exactly once, whatever the profilers do, and wait for it.  Raises what it raises.

    ``addresses``: those of workers, which this process' profiler does not see; none: this process.
    ``expected_s``: about the seconds of the call; workers' profilers record for twice as long.
    """
    own: list[TracedEvent] = []
    events: dict[str, list[TracedEvent]] = {} if addresses else {"": own}
    files: dict[str, bytes] = {}
    results: list[Any] = []
    seconds, under_way = 0.0, False
    of_workers = _workers(addresses, expected_s, events, files)
    try:
        with of_workers if addresses else tf_profiler.traced_events(own, files):
            under_way = True
            started = time.perf_counter()
            results.append(run())
            nests.synchronize(results[0])
            seconds = time.perf_counter() - started
    except BackendError as error:
        if under_way and not results:
            raise
        return Traced(results[0] if results else run(), failed=str(error))
    return Traced(results[0], events, files, seconds)


@contextlib.contextmanager
def _workers(
    addresses: Sequence[str], expected_s: float, events: dict[str, list[TracedEvent]], files: dict[str, bytes]
) -> Iterator[None]:
    seconds = 2 * expected_s + 2 * _MARGIN_S
    with ThreadPoolExecutor(1) as threads:
        traced = threads.submit(tf_profiler.trace_workers, addresses, seconds, files)
        time.sleep(_MARGIN_S)  # until they look on
        yield
        events.update(traced.result())


_LOG = logging.getLogger("tf_ooo")
# So many of the first fifty executions are recorded: later the executor makes no events of cheap ops.
STEPS = 3
Span = tuple[float, float]  # (begin, end) in seconds
_NEGLIGIBLE = 0.02
_HANDING_ON = frozenset(
    ("Cast", "ExpandDims", "Identity", "IteratorGetNext", "Pack", "ReadVariableOp", "Reshape", "Shape")
    + ("Squeeze", "StridedSlice")
)
_UPDATES = re.compile(r":(Assign|Resource(Apply|Scatter))")
_DEDUCED = (
    "the profiler does not see communication: it is drawn from the end of the weight gradient to the begin "
    "of the update"
)


@dataclass(frozen=True)
class Watched:
    """Describes the running plan, for a profile to be read.

    Attributes:
        schedule: as planned.
        tasks: gives the task of each op, by its name.
        timed: seconds of steps that the mode collects; recorded steps are taken out again.
        why: why the order that runs is not the plan's, where that is known.
        why_not: why no task can be seen; then only the raw profile is written.
        addresses: those of workers, which this process' profiler does not see.
        one_by_one: the plan is an order without seconds; its tasks are drawn with measured seconds.
        late_gradients: gradients are an earlier batch's, and may run before a forward pass.
    """

    schedule: Schedule
    tasks: Callable[[], Mapping[str, Task]]
    timed: deque[float] = field(default_factory=deque)
    why: str = ""
    why_not: str = ""
    addresses: Sequence[str] = ()
    one_by_one: bool = False
    late_gradients: bool = False


class Recorder:
    """Stands in the place of a training's ``run``, records executions and fills in the report.

    ``watched`` describes the running plan, None before it runs; ``plugins/profile`` is written to ``folder``.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        watched: Callable[[], Watched | None],
        report: Callable[[], Report],
        folder: str | os.PathLike[str],
    ) -> None:
        self._run, self._watched, self._report, self._folder = run, watched, report, folder
        self._records: list[Traced] = []
        self._last: Watched | None = None
        self._ended = False

    def run(self, given: Any) -> Any:
        """Run one execution, recorded if it is one of the plan's first; return its outputs."""
        watched = None if self._ended else self._watched()
        if watched is None:
            return self._run(given)
        self._last = watched
        outputs = self._recorded(given, watched)
        # Workers are asked for a second each time.
        if len(self._records) >= (1 if watched.addresses else STEPS):
            self.close()
        return outputs

    def _recorded(self, iterator: object, watched: Watched) -> Any:
        before = list(watched.timed)
        try:
            expected_s = max(before, default=1.0)
            traced = run_traced(lambda: self._run(iterator), watched.addresses, expected_s)
        finally:
            watched.timed.clear()
            watched.timed.extend(before)
        if traced.failed:
            self._ended = True
            self._say(traced.failed)
            _LOG.warning("no timeline is measured: %s", traced.failed)
        else:
            self._records.append(traced)
        return traced.outputs

    def close(self) -> None:
        """Fill in the report with what was recorded; does nothing the second time."""
        if self._ended:
            return
        self._ended = True
        if self._last is None or not self._records:
            report = self._report()
            if report.measured_timeline is None and not report.not_measured:
                self._say(report.fallback_reason or "training ended before the plan ran")
            return
        records, self._records = sorted(self._records, key=lambda record: record.seconds), []
        try:
            self._fill(self._last, records)
        except Exception as error:  # a picture must not end a training
            _LOG.debug("no measured timeline", exc_info=True)
            self._say(f"the profile could not be read: {type(error).__name__}: {error}")

    def _say(self, why_not: str) -> None:
        self._report().change(not_measured=why_not)

    def _fill(self, watched: Watched, records: Sequence[Traced]) -> None:
        """Fill the report from the execution of median seconds among those in which tasks ran."""
        report = self._report()
        self._write(records[len(records) // 2].files)
        if watched.why_not:
            self._say(watched.why_not)
            return
        tasks, schedule = watched.tasks(), watched.schedule
        seen = [list(itertools.chain.from_iterable(record.events.values())) for record in records]
        with_tasks = [events for events in (last_execution(each, tasks) for each in seen) if events]
        if not with_tasks:
            self._say("the profile has no op of the plan in it")
            return
        events = with_tasks[len(with_tasks) // 2]
        ran, planned = task_times(events, tasks, watched.late_gradients), set(tasks.values())
        constant = {tasks[event.label.partition(":")[0]] for event in events} - ran.keys()
        deduced = between_neighbours(ran, planned - ran.keys())
        ran |= deduced
        measured = measured_timeline(schedule, ran, busy_seconds(events, tasks, schedule))
        if watched.one_by_one and report.timeline is None:
            report.change(timeline=one_by_one(schedule, {task: each.ops_s for task, each in ran.items()}))
        timeline = None if watched.one_by_one else report.timeline
        differs = against_plan(
            schedule, measured, timeline, report.task_name, watched.why, planned - constant
        )
        report.put(Recorded(measured, [*differs, _DEDUCED] if deduced else differs))

    def _write(self, files: Mapping[str, bytes]) -> None:
        """Write the profile where TensorBoard looks for it; a folder that cannot be written is logged."""
        try:
            for name, content in files.items():
                path = Path(self._folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        except OSError as error:
            _LOG.warning("the profile was not written: %s", error)


def task_times(
    events: Iterable[TracedEvent], tasks: Mapping[str, Task], late_gradients: bool = False
) -> dict[Task, TaskTime]:
    """Return when each task ran.

    Very short ops at a task's ends do not count: those that wait for no message run early.  Nor do ops that
    only hand weights and labels on, unless the task has no others.  A gradient's op that ran before its own
    forward pass began does not depend on it, and does not count either; a gradient of such ops alone is left
    out.  ``late_gradients``: gradients are an earlier batch's, and may come first.
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
        if after := [span for span in spans[task] if span[0] >= forward.begin_s]:
            yield task, _extent(sorted(after))


def _extent(spans: Sequence[Span]) -> TaskTime:
    """Return the first begin and the last end, ignoring a small share of the time at either end."""
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

    Between two ops of one task a device may be idle, too, while it waits for a message.  Tasks that the
    schedule does not name count for its first device.
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
    """Return the events of ops that belong to tasks; if a graph ran several times in a call, the last run's.

    On a GPU an op's kernels stand for it, not their launch.
    """
    by_op: defaultdict[tuple[str, str, bool], list[TracedEvent]] = defaultdict(list)
    for event in events:
        name = event.label.partition(":")[0]
        if name in tasks and not event.line.startswith("tf_data"):
            by_op[name, event.label, event.plane.startswith("/device:GPU")].append(event)
    on_gpu = {name for name, _, gpu in by_op if gpu}
    kept = [ran for (name, _, gpu), ran in by_op.items() if gpu or name not in on_gpu]
    runs = min(map(len, kept), default=1)
    by_begin = [sorted(ran, key=lambda event: event.begin_s) for ran in kept]
    return [event for ran in by_begin for event in ran[-(len(ran) // runs) :]]


def span_of(event: TracedEvent) -> Span:
    """Return begin and end of an event of TensorFlow's profiler."""
    return event.begin_s, event.begin_s + event.duration_s


def busy_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in which at least one of the given spans runs, in order and disjoint."""
    busy: list[Span] = []
    for begin_s, end_s in sorted(spans):
        if busy and begin_s <= busy[-1][1]:
            busy[-1] = (busy[-1][0], max(end_s, busy[-1][1]))
        else:
            busy.append((begin_s, end_s))
    return busy


def length_s(spans: Iterable[Span]) -> float:
    """Return the seconds of all spans together."""
    return sum(end_s - begin_s for begin_s, end_s in spans)
