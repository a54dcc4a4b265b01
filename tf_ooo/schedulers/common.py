"""Lanes that several policies build alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tf_ooo.errors import OptionsError
from tf_ooo.schedule import Schedule, Task, TaskList
from tf_ooo.schedulers.problem import Problem

COMPUTE, COMMUNICATION = (0, 0), (0, 1)


def one_worker(
    policy: str, problem: Problem, backward: Sequence[Task], communication: Sequence[int] = ()
) -> Schedule:
    """The whole model on one device: forward, the given backward tasks, updates.

    Args:
        policy: its name.
        problem: with several devices the schedule is that of each data parallel worker.
        backward: dO and dW tasks in their order.
        communication: layers in the order of their gradients' allreduce; only with several devices.

    Raises:
        OptionsError: several micro-batches.
    """
    if problem.microbatches != 1:
        raise OptionsError(
            f"schedule {policy!r} on one device takes one micro-batch, got {problem.microbatches}"
        )
    layers = range(len(problem.layers))
    forward = [Task("F", layer) for layer in layers]
    schedule = Schedule("single_device", policy)
    if problem.devices == 1:
        done = [task for task in backward for task in _with_update(task)]
        return dataclasses.replace(schedule, lanes={COMPUTE: TaskList([*forward, *done])})
    updates = [Task("U", layer) for layer in communication]
    # Forward of the next step waits for its own layer's update only: updates run where they are ready.
    return dataclasses.replace(
        schedule,
        mode="data_parallel",
        workers=problem.devices,
        lanes={
            COMPUTE: TaskList([*forward, *backward]),
            COMMUNICATION: TaskList([Task("comm", layer) for layer in communication]),
            (0, 2): TaskList(updates),
        },
    )


def _with_update(task: Task) -> list[Task]:
    return [task, Task("U", task.stage)] if task.kind == "dW" else [task]
