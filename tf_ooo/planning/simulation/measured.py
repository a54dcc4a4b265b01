"""Builds measured timelines from the times of tasks, and compares them with the plan in plain words."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tf_ooo.planning.model.schedule import Lane, Schedule, TaskList
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.units import seconds_text

# More would be a picture of threads, not of tasks: the rest is drawn behind each other.
_MOST_STREAMS = 8
_ON_STREAMS_OF_THEIR_OWN = ("comm", "U")
TaskTimes = Mapping[Task, "TaskTime"]
Spans = Mapping[Task, tuple[float, float]]


class TaskTime(NamedTuple):
    """Says when a task ran, in seconds since a common moment, and the sum of its ops' seconds.

    If several of its ops ran at once, or it waited between two, the sum is not end minus start.
    """

    begin_s: float
    end_s: float
    ops_s: float


def one_after_another(schedule: Schedule, seconds: Mapping[Task, float]) -> Timeline:
    """Return a timeline in which each lane's tasks follow without waiting; unknown ones take no time."""
    return _without_waiting(schedule, [(0.0, tasks) for tasks in schedule.lanes.values()], seconds)


def _without_waiting(
    schedule: Schedule, parts: Iterable[tuple[float, Iterable[Task]]], seconds: Mapping[Task, float]
) -> Timeline:
    """Lay tasks out, lane after lane; a lane has parts, each of which begins at a given time."""
    starts: list[float] = []
    ends: list[float] = []
    for begin_s, tasks in parts:
        upto = np.cumsum([begin_s, *(seconds.get(task, 0.0) for task in tasks)]).tolist()
        starts += upto[:-1]
        ends += upto[1:]
    return Timeline(schedule, np.array([starts]), np.array([ends]))


def one_by_one(schedule: Schedule, seconds: Mapping[Task, float]) -> Timeline:
    """Return a step of one device: all ops one by one, dO and dW in the order of the schedule.

    F come first, layer after layer, and updates last; tasks missing in ``seconds`` take no time.  Side
    streams run beside the main one, from the end of F on.
    """
    there = set(schedule.tasks)
    forward, updates = (
        sorted(task for task in seconds if task.kind == kind and task not in there) for kind in ("F", "U")
    )
    main = min(schedule.lanes, default=(0, 0))
    backward = schedule.lanes or {main: TaskList(())}
    forward_s = sum(seconds[task] for task in forward)
    behind_s = forward_s + max(sum(seconds.get(task, 0.0) for task in lane) for lane in backward.values())
    lanes: dict[Lane, TaskList] = {}
    parts: list[tuple[float, Sequence[Task]]] = []
    for lane, tasks in backward.items():
        before, behind = (forward, updates) if lane == main else ([], [])
        parts += [(0.0, before), (forward_s, tasks), (behind_s, behind)]
        lanes[lane] = TaskList([*before, *tasks, *behind])
    whole = dataclasses.replace(schedule, lanes=lanes, priority_lanes=frozenset(lanes), after=(), parts={})
    return _without_waiting(whole, parts, seconds)


def repeated(schedule: Schedule, times: int) -> Schedule:
    """Repeat a schedule for a step of several turns, with each turn's micro-batches behind the last's.

    Only the last turn has updates, which no task follows.
    """
    if times == 1:
        return schedule
    begins = [turn * schedule.microbatches for turn in range(times)]
    lanes = {
        lane: TaskList(
            dataclasses.replace(task, microbatch=begin + task.microbatch)
            for begin in begins
            for task in tasks
            if task.kind != "U" or begin == begins[-1]
        )
        for lane, tasks in schedule.lanes.items()
    }
    return dataclasses.replace(schedule, lanes=lanes, microbatches=times * schedule.microbatches)


def between_neighbours(times: TaskTimes, unseen: Iterable[Task]) -> dict[Task, TaskTime]:
    """Return times of unseen communication: from the end of its dW to the begin of its update."""
    spans = {}
    for task in unseen:
        before, after = (times.get(Task(kind, task.stage)) for kind in ("dW", "U"))
        if task.kind == "comm" and before is not None and after is not None:
            end_s = max(before.end_s, after.begin_s)
            spans[task] = TaskTime(before.end_s, end_s, end_s - before.end_s)
    return spans


def measured_timeline(schedule: Schedule, times: TaskTimes, busy_s: Sequence[float] = ()) -> Timeline:
    """Return the measured timeline on the schedule's devices, from the first task's begin on.

    Tasks that ran side by side on a device have a stream each; communication and updates, which run beside
    others whenever they can, have streams of their own.  Tasks that the schedule does not name (F, where it
    orders the backward pass only) are on its first device.  Tasks that were not seen are left out.

    Args:
        schedule: as planned.
        times: when each task ran.
        busy_s: seconds of each device in which an op of a task ran; empty: whenever a task ran.
    """
    device_of = {task: device for (device, _), tasks in schedule.lanes.items() for task in tasks}
    first = min(schedule.lanes, default=(0, 0))[0]
    first_s = min((each.begin_s for each in times.values()), default=0.0)
    by_device: dict[tuple[int, str], list[Task]] = {}
    for task in sorted(times, key=lambda task: (times[task].begin_s, times[task].end_s)):
        alone = task.kind if task.kind in _ON_STREAMS_OF_THEIR_OWN else ""
        by_device.setdefault((device_of.get(task, first), alone), []).append(task)
    lanes: dict[Lane, TaskList] = {}
    for (device, _), tasks in sorted(by_device.items()):
        taken = sum(lane[0] == device for lane in lanes)
        for number, stream in enumerate(_side_by_side(tasks, times)):
            lanes[device, taken + number] = TaskList(stream)
    placed = [times[task] for tasks in lanes.values() for task in tasks]
    measured = dataclasses.replace(
        schedule,
        lanes=lanes,
        parts={},
        after=(),
        priority_lanes=frozenset(lanes),  # in the order in which they ran, whatever was planned
        predicted_step_s=None,
        predicted_peak_bytes=None,
    )
    start_s = np.array([[each.begin_s - first_s for each in placed]])
    end_s = np.array([[each.end_s - first_s for each in placed]])
    return Timeline(measured, start_s, end_s, measured_busy_s=tuple(busy_s))


def _side_by_side(tasks: Iterable[Task], times: TaskTimes) -> list[list[Task]]:
    """Return streams in which each task begins after the one before it has ended."""
    streams: list[list[Task]] = []
    for task in tasks:
        if free := [stream for stream in streams if times[stream[-1]].end_s <= times[task].begin_s]:
            free[0].append(task)
        elif len(streams) < _MOST_STREAMS:
            streams.append([task])
        else:
            min(streams, key=lambda stream: times[stream[-1]].end_s).append(task)
    return streams


def against_plan(
    schedule: Schedule,
    measured: Timeline,
    planned: Timeline | None,
    name_of: Callable[[Task], str],
    why: str = "",
    there: Collection[Task] | None = None,
) -> list[str]:
    """Say in a few lines how the measured step differs from the plan.

    Args:
        schedule: as planned.
        measured: the measured timeline of one step.
        planned: simulated; None where no seconds are known.
        name_of: returns a task in words.
        why: the known reason for a different order.
        there: tasks that have ops; the lowest layer's dO, for one, may have none.  None: all have.
    """
    times_s = {event.task: (event.start_s, event.end_s) for event in measured.iter_events()}
    expected = [task for task in schedule.tasks if there is None or task in there]
    seen, total = sum(task in times_s for task in expected), len(expected)
    lines = []
    if seen < total:
        lines.append(f"{total - seen} of {total} planned tasks were not seen by the profiler")
    lines.append(_order_text(schedule, times_s, name_of, why))
    took = f"measured {seconds_text(measured.makespan_s)} (with the profiler)"
    busy = f"measured {_shares(measured.busy_s, measured.makespan_s)}"
    if planned is None:
        return [*lines, took, f"busy, {busy}"]
    step_s, busy_s = _of_a_step(planned)
    planned_busy = f"busy, planned {_shares(busy_s, step_s)}; {busy}"
    return [*lines, f"a step planned {seconds_text(step_s)}, {took}", planned_busy]


def _order_text(schedule: Schedule, times_s: Spans, name_of: Callable[[Task], str], why: str) -> str:
    moved, compared, first, beside = 0, 0, "", True
    # Updates run whenever they can, a fused dW with its dO.
    unordered = {"U", "dW"} if schedule.fused_backward else {"U"}
    for tasks in schedule.lanes.values():
        present = [task for task in tasks if task.kind not in unordered and task in times_s]
        compared += len(present)
        early = begun_early(present, times_s)
        moved += len(early)
        beside = beside and all(times_s[task][1] > times_s[before][0] for task, before in early)
        if early and not first:
            first = f"{name_of(early[0][0])} began before {name_of(early[0][1])}"
    if not compared:
        return "no planned task was seen: orders cannot be compared"
    if not moved:
        return f"measured order is the plan's ({compared} tasks)"
    reason = why or (
        "they ran side by side, as TensorFlow starts what has its inputs"
        if beside
        else "no edge orders them, and their inputs were there early"
    )
    return f"measured order differs from the plan in {moved} of {compared} tasks: {first}; {reason}"


def begun_early(tasks: Sequence[Task], times_s: Spans) -> list[tuple[Task, Task]]:
    """Return the fewest tasks without which the rest began in this order.

    Returns:
        Pairs of such a task and one with which it changed places: the task that began early comes first.
    """
    kept = _longest_rising([times_s[task][0] for task in tasks])
    pairs = []
    for place, task in enumerate(tasks):
        if place in kept:
            continue
        begin_s = times_s[task][0]
        late = next((t for t in tasks[:place] if times_s[t][0] > begin_s), None)
        early = next((t for t in tasks[place + 1 :] if times_s[t][0] < begin_s), None)
        if late is not None:
            pairs.append((task, late))
        elif early is not None:
            pairs.append((early, task))
    return pairs


def _longest_rising(values: Sequence[float]) -> set[int]:
    """Return the places of a longest subsequence that never falls."""
    tails: list[float] = []
    places: list[int] = []
    before: list[int | None] = []
    for place, value in enumerate(values):
        at = bisect.bisect_right(tails, value)
        before.append(places[at - 1] if at else None)
        tails[at:], places[at:] = [value, *tails[at + 1 :]], [place, *places[at + 1 :]]
    kept: set[int] = set()
    last = places[-1] if places else None
    while last is not None:
        kept.add(last)
        last = before[last]
    return kept


def _of_a_step(planned: Timeline) -> tuple[float, list[float]]:
    """Return a step's seconds, and those in which each device computes; asynchronous: of one batch."""
    asynchronous = planned.schedule.asynchronous
    steps = planned.schedule.microbatches if asynchronous else planned.steps
    step_s = planned.steady_step_s if asynchronous else planned.makespan_s / steps
    return step_s, [busy_s / steps for busy_s in planned.busy_s]


def _shares(busy_s: Sequence[float], step_s: float) -> str:
    """Say for each device the share of the time in which it computes."""
    return ", ".join(f"device {number} {busy / (step_s or 1.0):.0%}" for number, busy in enumerate(busy_s))
