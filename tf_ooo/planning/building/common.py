"""Lanes that several policies build alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tf_ooo.errors import OptionsError
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList

COMPUTE, COMMUNICATION, UPDATE = (0, 0), (0, 1), (0, 2)


def one_worker(
    policy: str,
    problem: Problem,
    backward: Sequence[Task],
    communication: Sequence[Task] = (),
    *,
    barrier: bool = False,
    by_priority: bool = False,
    shares: Mapping[int, tuple[float, ...]] | None = None,
) -> Schedule:
    """F, the given backward tasks, updates, of one device or of each data parallel worker.

    Several workers send ``communication`` in its order or, ``by_priority``, what is ready, the first listed
    first.  With a ``barrier`` the next step waits for all updates.  ``shares`` are those of a layer's sliced
    gradient.
    """
    if problem.microbatches != 1:
        raise OptionsError(
            f"schedule {policy!r} on one device takes one micro-batch, got {problem.microbatches}"
        )
    layers = range(len(problem.layers))
    tasks = [Task("F", layer) for layer in layers]
    schedule = Schedule("single_device", policy)
    if problem.devices == 1:
        for task in backward:
            tasks += [task, Task("U", task.stage)] if task.kind == "dW" else [task]
        return dataclasses.replace(schedule, lanes={COMPUTE: TaskList(tasks)})
    # A layer without bytes is not communicated, and would have to wait for those that have some.
    sent = [task for task in communication if problem.layers[task.stage].weight_bytes]
    lanes = {
        COMPUTE: TaskList([*tasks, *backward]),
        **({COMMUNICATION: TaskList(sent)} if sent else {}),
        # Updates have a lane of their own: each runs as soon as its gradient is there.
        UPDATE: TaskList([Task("U", layer) for layer in layers]),
    }
    return dataclasses.replace(
        schedule,
        mode="data_parallel",
        workers=problem.devices,
        lanes=lanes,
        barrier=barrier,
        priority_lanes=frozenset({COMMUNICATION, UPDATE} & lanes.keys() if by_priority else {UPDATE}),
        parts={("comm", layer): held for layer, held in (shares or {}).items()},
    )
