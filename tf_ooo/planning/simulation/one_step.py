"""One step of a planned timeline, to be laid beside one that was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tf_ooo.planning.model.arrays import Floats
from tf_ooo.planning.model.memory import MemoryCurve
from tf_ooo.planning.model.schedule import Lane, Schedule, TaskList
from tf_ooo.planning.model.task import Task

if TYPE_CHECKING:
    from tf_ooo.planning.simulation.timeline import Timeline


def one_step(timeline: Timeline) -> Timeline:
    """The last of several steps, from its first task on; of an asynchronous schedule a round in the middle.

    In such a round each task runs once, each for another micro-batch.
    """
    if timeline.schedule.asynchronous:
        return _round(timeline)
    if timeline.steps == 1:
        return timeline
    start_s, end_s = timeline.start_s[-1:], timeline.end_s[-1:]
    first_s = float(start_s.min(initial=np.inf))
    return _window(timeline, timeline.schedule, start_s - first_s, end_s - first_s, first_s)


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
    """These tasks, with the memory and the messages of their time."""
    last_s = first_s + float(end_s.max(initial=0.0))
    sent = timeline.message_columns
    within = (sent.start_s >= first_s) & (sent.start_s < last_s)
    messages = dataclasses.replace(
        sent,
        source=sent.source[within],
        target=sent.target[within],
        size_bytes=sent.size_bytes[within],
        start_s=sent.start_s[within] - first_s,
        end_s=sent.end_s[within] - first_s,
    )
    return dataclasses.replace(
        timeline,
        schedule=schedule,
        start_s=start_s,
        end_s=end_s,
        memory=list(_curves(timeline, first_s, last_s)),
        message_columns=messages,
        _repeat=None,
    )


def _curves(timeline: Timeline, first_s: float, last_s: float) -> Iterator[MemoryCurve]:
    """Yield for each curve what is alive at the begin, and each change until the end."""
    for curve in timeline.memory:
        time_s, alive = np.asarray(curve.time_s), np.asarray(curve.alive_bytes)
        before, within = time_s <= first_s, (time_s > first_s) & (time_s <= last_s)
        at_first = alive[before][-1] if before.any() else 0.0
        yield MemoryCurve(
            np.concatenate([[0.0], time_s[within] - first_s]), np.concatenate([[at_first], alive[within]])
        )
