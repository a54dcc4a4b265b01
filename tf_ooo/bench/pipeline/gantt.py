"""When each task of a pipeline really ran: from the profilers of the workers to a timeline."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tf_ooo.compat.tf_profiler import TracedEvent, trace_workers
from tf_ooo.costs.layer_costs import SECONDS, LayerCosts
from tf_ooo.fit.spans import Span
from tf_ooo.planning.model.schedule import Schedule, TaskList
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.measured import Ran
from tf_ooo.planning.simulation.timeline import Timeline

_MARGIN_S = 0.4
_UPDATE_STREAM = 2


def traced(step: Callable[[], float], addresses: Sequence[str], step_s: float) -> list[TracedEvent]:
    """Runs one step while the workers' profilers look on; their events."""
    ran = threading.Timer(_MARGIN_S, step)
    ran.start()
    try:
        by_worker = trace_workers(addresses, 2 * step_s + 2 * _MARGIN_S)
        return list(itertools.chain.from_iterable(by_worker.values()))
    finally:
        ran.join()


def task_seconds(times: Mapping[Task, Ran], stages: Sequence[LayerCosts]) -> list[list[str | int | float]]:
    """``[kind, stage, seconds, ops' seconds, seconds planned]`` of each stage's tasks: medians."""
    of_stages: dict[tuple[str, int], list[Ran]] = {}
    for task, ran in times.items():
        of_stages.setdefault((task.kind, task.stage), []).append(ran)
    return [
        [
            kind,
            stage,
            statistics.median(ran.end_s - ran.begin_s for ran in rans),
            statistics.median(ran.ops_s for ran in rans),
            getattr(stages[stage], SECONDS[kind]),
        ]
        for (kind, stage), rans in sorted(of_stages.items())
    ]


def measured_timeline(
    schedule: Schedule, times: Mapping[Task, Ran], busy_s: Sequence[float] = ()
) -> Timeline:
    """The schedule with the times at which its tasks ran; what was not seen takes no time.

    Updates, which run beside other tasks whenever their gradients are there, get a lane of their own.
    Where a schedule computes a dO and the dW that follows together, their ops alternate: one is drawn
    behind the other, in the time of both.  ``busy_s``: of each device; empty: whenever a task ran.
    """
    first_s = min((ran.begin_s for ran in times.values()), default=0.0)
    ran = dataclasses.replace(schedule, lanes=_updates_apart(schedule), predicted_step_s=None)
    spans = {task: (span.begin_s - first_s, span.end_s - first_s) for task, span in times.items()}
    if schedule.fused_backward:
        spans |= _one_behind_the_other(times, first_s)
    starts, ends = [], []
    for _, lane in ran.lanes.items():
        at_s = 0.0
        for task in lane:
            begin_s, end_s = spans.get(task, (at_s, at_s))
            starts.append(max(begin_s, at_s))
            ends.append(max(end_s, starts[-1]))
            at_s = ends[-1]
    return Timeline(ran, np.array([starts]), np.array([ends]), measured_busy_s=tuple(busy_s))


def _one_behind_the_other(times: Mapping[Task, Ran], first_s: float) -> dict[Task, Span]:
    """Spans of the dO and dW of each stage: the time of both, divided by what their ops took."""
    spans = {}
    for task, output_grad in times.items():
        after = Task("dW", task.stage, task.microbatch)
        if task.kind == "dO" and after in times:
            weight_grad = times[after]
            begin_s = min(output_grad.begin_s, weight_grad.begin_s) - first_s
            end_s = max(output_grad.end_s, weight_grad.end_s) - first_s
            share = output_grad.ops_s / ((output_grad.ops_s + weight_grad.ops_s) or 1.0)
            between_s = begin_s + share * (end_s - begin_s)
            spans[task], spans[after] = (begin_s, between_s), (between_s, end_s)
    return spans


def _updates_apart(schedule: Schedule) -> dict[tuple[int, int], TaskList]:
    lanes: dict[tuple[int, int], TaskList] = {}
    for (device, stream), tasks in schedule.lanes.items():
        lanes[device, stream] = TaskList([task for task in tasks if task.kind != "U"])
        updates = [task for task in tasks if task.kind == "U"]
        if updates:
            lanes[device, stream + _UPDATE_STREAM] = TaskList(updates)
    return lanes
