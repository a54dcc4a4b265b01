"""Writes a schedule as the CSV file that ``torch.distributed.pipelining`` loads.

``_PipelineScheduleRuntime._load_csv`` of torch 2.14 takes a row for each rank.  An action is a stage, a
letter and a micro-batch: F is the forward, I the gradients of a stage's inputs (dO), W those of its weights
(dW), B both.  Torch reads from the rows which rank has which stage, and adds all messages itself.  U has no
action: the optimizer is the user's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tf_ooo.errors import ScheduleError
from tf_ooo.planning.model.task import Task

if TYPE_CHECKING:
    from tf_ooo.planning.model.schedule import Schedule

_LETTERS = {"F": "F", "dO": "I", "dW": "W"}
_I_THEN_W = re.compile(r"\b(\d+)I(\d+),\1W\2\b")


def torch_csv(schedule: Schedule) -> str:
    """Return the text of the file.  ScheduleError says what torch cannot run, and what to do."""
    if refused := next(_refused(schedule), ""):
        raise ScheduleError(f"{schedule.policy} is no schedule for torch: {refused}")
    ranks = {task.stage: rank for (rank, _), tasks in schedule.lanes.items() for task in tasks}
    # Elsewhere another rank waits for the dO alone: with its dW in one action it would wait longer.
    at_once = {
        stage
        for stage, rank in ranks.items()
        if schedule.fused_backward or ranks.get(stage - 1, rank) == rank
    }
    rows = [
        _I_THEN_W.sub(
            lambda pair: f"{pair[1]}B{pair[2]}" if int(pair[1]) in at_once else pair[0], ",".join(row)
        )
        for row in map(_actions, schedule.lanes.values())
    ]
    return "".join(f"{row}\n" for row in rows)


def _actions(tasks: Iterable[Task]) -> Iterator[str]:
    """Yield the actions; a dO without a dW, or a dW without a dO, is its stage's whole backward pass."""
    there = [task for task in tasks if task.kind in _LETTERS]
    backward = Counter((task.stage, task.microbatch) for task in there if task.kind != "F")
    for task in there:
        alone = task.kind != "F" and backward[task.stage, task.microbatch] == 1
        yield f"{task.stage}{'B' if alone else _LETTERS[task.kind]}{task.microbatch}"


def _refused(schedule: Schedule) -> Iterator[str]:
    """Yield in words each thing that torch cannot run."""
    if schedule.mode != "pipeline" or schedule.asynchronous or schedule.devices == 1:
        what = f"mode {schedule.mode}{', asynchronous' * schedule.asynchronous}, {schedule.devices} devices"
        yield f"it has {what}; plan a pipeline of several devices (--mode pipeline --devices 2)"
    if schedule.workers > 1:
        yield f"it is one of {schedule.workers} replicas; plan one, and average gradients with torch's DDP"
    if schedule.recompute:
        again = ", ".join(map(str, schedule.recompute))
        yield (
            f"its layers {again} run their forward again; plan with recompute='none', and wrap them in "
            "torch.utils.checkpoint"
        )
    if schedule.priority_lanes or schedule.after or schedule.parts:
        yield "it has priorities, waits or parts of tasks; leave out 'priority', 'after' and 'parts'"
    yield from _misplaced(schedule)


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Yield in words what is on no rank, on two, or missing."""
    if [rank for rank, _ in schedule.lanes] != list(range(schedule.devices)):
        yield f"it has the lanes {list(schedule.lanes)}; a rank has one, and each rank has one"
    rank_of, kinds = dict[int, int](), dict[tuple[int, int], set[str]]()
    for (rank, _), tasks in schedule.lanes.items():
        for task in tasks:
            if rank_of.setdefault(task.stage, rank) != rank:
                first = rank_of[task.stage]
                yield f"{task} is on device {rank}, others of its stage on {first}; put all on one of them"
            kinds.setdefault((task.stage, task.microbatch), set()).add(task.kind)
        if not tasks:
            yield f"device {rank} has no stage; plan for fewer devices"
    for stage in range(max(len(schedule.stages), max(rank_of) + 1)):
        for microbatch in range(schedule.microbatches):
            there = kinds.get((stage, microbatch), set())
            if "F" not in there or not there & {"dO", "dW"}:
                yield f"F:{stage}@{microbatch} or its backward is missing; torch runs both of each stage"
    last = max(rank_of)
    order = [task.microbatch for task in schedule.tasks if (task.kind, task.stage) == ("F", last)]
    if order != sorted(order):
        yield f"F:{last}, of the last stage, have the order {order}; torch wants its micro-batches in order"
