"""When each task of a pipeline really ran: from the profilers of the workers to a timeline."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tf_ooo import compat
from tf_ooo.schedule import Schedule
from tf_ooo.task import Task
from tf_ooo.timeline import Timeline

_MARGIN_S = 0.4
_UPDATES = re.compile(r":(Assign|Resource(Apply|Scatter))")


def traced(step: Callable[[], float], addresses: Sequence[str], step_s: float) -> Mapping[str, Any]:
    """Runs one step while the workers' profilers look on; their events by address."""
    ran = threading.Timer(_MARGIN_S, step)
    ran.start()
    try:
        return compat.trace_workers(addresses, 2 * step_s + 2 * _MARGIN_S)
    finally:
        ran.join()


def task_times(events: Mapping[str, Any], tasks: Mapping[str, Task]) -> dict[Task, tuple[float, float]]:
    """First begin and last end of each task's ops, seconds since the epoch."""
    found: dict[Task, tuple[float, float]] = {}
    for one in (event for per_worker in events.values() for event in per_worker):
        task = tasks.get(one.label.partition(":")[0])
        if task is None or (task.kind == "U" and not _UPDATES.search(one.label)):
            continue  # constants and the like of an update are made at any time
        begin_s, end_s = found.get(task, (float("inf"), 0.0))
        found[task] = min(begin_s, one.begin_s), max(end_s, one.begin_s + one.duration_s)
    return found


def measured_timeline(schedule: Schedule, times: Mapping[Task, tuple[float, float]]) -> Timeline:
    """The schedule with the times at which its tasks ran; what was not seen takes no time."""
    first_s = min((begin_s for begin_s, _ in times.values()), default=0.0)
    starts, ends = [], []
    for _, lane in schedule.lanes.items():
        at_s = 0.0
        for task in lane:
            begin_s, end_s = times.get(task, (first_s + at_s, first_s + at_s))
            starts.append(begin_s - first_s)
            ends.append(end_s - first_s)
            at_s = ends[-1]
    return Timeline(schedule, np.array([starts]), np.array([ends]))


def busy_share(events: Mapping[str, Any], tasks: Mapping[str, Task], devices: int) -> float:
    """The share of the devices' time, from the first op to the last, in which at least one op ran."""
    busy_s, first_s, last_s = 0.0, float("inf"), 0.0
    for per_worker in events.values():
        spans = sorted(
            (one.begin_s, one.begin_s + one.duration_s)
            for one in per_worker
            if one.label.partition(":")[0] in tasks
        )
        reached_s = 0.0
        for begin_s, end_s in spans:
            busy_s += max(0.0, end_s - max(begin_s, reached_s))
            reached_s = max(reached_s, end_s)
        if spans:
            first_s, last_s = min(first_s, spans[0][0]), max(last_s, reached_s)
    return busy_s / (devices * (last_s - first_s)) if last_s > first_s else 0.0
