"""Lanes: the tasks of a (device, stream) in their order, and what no order may do."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.task import KIND_NUMBER, Fields, Task, TaskList

Lane = tuple[int, int]
# (task, other, steps): the task waits for the other one of so many steps later.
After = tuple[Task, Task, int]


def check_lanes(
    lanes: Mapping[Lane, TaskList], priority_lanes: frozenset[Lane] = frozenset(), asynchronous: bool = False
) -> None:
    """Raises ScheduleError where a task occurs twice, or stands after one that needs it."""
    codes = np.concatenate([np.zeros(0, np.int64), *(tasks.codes for tasks in lanes.values())])
    codes.sort()
    twice = np.flatnonzero(codes[1:] == codes[:-1])
    if len(twice):
        raise ScheduleError(f"duplicate: {Task.of_code(int(codes[twice[0]]))} is scheduled twice")
    for lane, tasks in lanes.items():
        if lane not in priority_lanes:
            _check_causal(lane, tasks, asynchronous)


def _check_causal(lane: Lane, tasks: TaskList, asynchronous: bool) -> None:
    """F, dO, dW, comm, U depend on each other in this order; what a step has once, after the dW of all."""
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
