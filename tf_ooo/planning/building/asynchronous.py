"""PipeDream's stages and their order: whole layers, and no forward that waits for an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import first_within
from tf_ooo.planning.building.layerpipe_cuts import TaskLine, best_cuts
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList


def whole_layers(name: str, problem: Problem, update_every: int) -> Schedule:
    """1F1B over contiguous stages, within the memory limit if NOAM can be so low."""
    stages = contiguous(problem)
    noams = range(problem.devices, 0, -1) if problem.memory_limit_bytes != 0 else [1]
    return first_within(problem, (_schedule(name, problem, stages, noam, update_every) for noam in noams))


def in_rounds(schedule: Schedule) -> Schedule:
    """As ``mode="layerpipe"`` runs it, for predictions: stage s of p runs 2 (p - 1 - s) rounds ahead."""
    last = len(schedule.stages) - 1
    lanes = {
        (stage, 0): TaskList(list(_lane(schedule, stage, 2 * (last - stage) + 1)))
        for stage in range(last + 1)
    }
    return dataclasses.replace(schedule, lanes=lanes)


def contiguous(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(first, last) layer of each stage.  OptionsError: more devices than layers."""
    layers, devices = problem.layers, problem.devices
    cuts = best_cuts(TaskLine.of(layers, inside=False), devices)
    if cuts is None:
        raise OptionsError(f"{devices} stages are more than the {len(layers)} layers; use fewer devices")
    bounds = [0, *(cut.layer for cut in cuts), len(layers)]
    return tuple((first, after - 1) for first, after in zip(bounds, bounds[1:], strict=False))


def _schedule(
    name: str, problem: Problem, stages: tuple[tuple[int, int], ...], noam: int, update_every: int
) -> Schedule:
    count = problem.microbatches
    schedule = Schedule(
        "layerpipe",
        name,
        microbatches=count,
        stages=stages,
        fused_backward=True,
        asynchronous=True,
        update_every=update_every,
    )
    lanes = {
        (stage, 0): TaskList(list(_lane(schedule, stage, min(noam, len(stages) - stage))))
        for stage in range(len(stages))
    }
    return dataclasses.replace(schedule, lanes=lanes)


def _lane(schedule: Schedule, stage: int, in_flight: int) -> Iterator[Task]:
    microbatches = schedule.microbatches
    ahead = min(in_flight, microbatches)
    for microbatch in range(ahead):
        yield Task("F", stage, microbatch)
    for microbatch in range(microbatches):
        for kind in ("dO", "dW", "U") if schedule.updates_after(microbatch) else ("dO", "dW"):
            yield Task(kind, stage, microbatch)
        if microbatch + ahead < microbatches:
            yield Task("F", stage, microbatch + ahead)
