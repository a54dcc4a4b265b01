"""Finds what a profile of a round shows: the tasks of as many batches as are on their way."""

from __future__ import annotations

from collections.abc import Collection

from tf_ooo.fit.recorder import Watched
from tf_ooo.modes.layerpipe.spread import Spread, SpreadPlan
from tf_ooo.modes.layerpipe.stages import HIGH
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList
from tf_ooo.rewriting.op_tasks import timed_ops

_KINDS = ("F", "dO", "dW", "U")


def watched_round(plan: SpreadPlan, over_rounds: Spread, planned: Schedule, together: int) -> Watched:
    """Return the last of the rounds that are run as one, or one alone, as at the end of an epoch.

    Each task is another batch's.
    """
    tasks = _tasks(over_rounds, planned)
    named = tasks | {f"round_{together - 1}/{name}": task for name, task in tasks.items()}
    schedule = round_schedule(planned, set(tasks.values()))
    return Watched(schedule, lambda: named, plan.step_s, late_gradients=True)


def round_schedule(planned: Schedule, tasks: Collection[Task]) -> Schedule:
    """Return each of the tasks once, on its processor: F before dO before dW there, as rounds are ordered."""
    lanes = {
        lane: TaskList(sorted((t for t in tasks if t in set(planned_there)), key=_place))
        for lane, planned_there in planned.lanes.items()
    }
    stages, whole = planned.stages, frozenset(planned.lanes)
    return Schedule(planned.mode, planned.policy, lanes, stages=stages, priority_lanes=whole)


def _place(task: Task) -> tuple[int, int]:
    """Forward goes up, backward down."""
    return _KINDS.index(task.kind), task.stage if task.kind == "F" else -task.stage


def _tasks(over_rounds: Spread, planned: Schedule) -> dict[str, Task]:
    """Return the task of each op; of the forward pass, only ops that say when it ran."""
    traced, stages = over_rounds.traced, range(len(planned.stages))
    stage_of = {layer: stage for stage in stages for layer in planned.layers_of(stage)}
    tasks, there = {}, set(planned.tasks)
    for name, (kind, layer) in traced.where.items():
        stage = stage_of.get(layer, layer)
        high = Task("dO", stage, 0, 1)
        # A part that is no task of the plan belongs to its output gradient.
        tasks[name] = Task(kind, stage) if kind != HIGH else high if high in there else Task("dO", stage)
    timed = timed_ops(traced.graph_def, tasks)
    return {name: task for name, task in timed.items() if name in over_rounds.rounds.of}
