"""PipeDream's stages and their order: whole layers, and no forward that waits for an update."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import first_within
from tf_ooo.planning.building.layerpipe_cuts import TaskLine, best_cuts
from tf_ooo.planning.building.pipeline import lane_codes, places
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList


def whole_layers(name: str, problem: Problem) -> Schedule:
    """1F1B over contiguous stages, within the memory limit if NOAM can be so low.

    OptionsError: more devices than layers.
    """
    count, layers = problem.devices, len(problem.layers)
    cuts = best_cuts(TaskLine.of(problem.layers, inside=False), count)
    if cuts is None:
        raise OptionsError(f"{count} stages are more than the {layers} layers; use fewer devices")
    starts = [0, *(cut.layer for cut in cuts), layers]
    bounds = tuple((first, after - 1) for first, after in itertools.pairwise(starts))
    shape = Schedule(
        "layerpipe",
        name,
        microbatches=problem.microbatches,
        stages=bounds,
        fused_backward=True,
        asynchronous=True,
    )
    noams = range(count, 0, -1) if problem.memory_limit_bytes != 0 else [1]
    in_flight = ([min(noam, count - stage) for stage in range(count)] for noam in noams)
    return first_within(problem, (_ordered(shape, counts) for counts in in_flight))


def in_rounds(schedule: Schedule) -> Schedule:
    """Order a schedule as ``mode="layerpipe"`` runs it: stage s of p runs 2 (p - 1 - s) rounds ahead."""
    last = len(schedule.stages) - 1
    return _ordered(schedule, [2 * (last - stage) + 1 for stage in range(last + 1)])


def _ordered(schedule: Schedule, in_flight: Sequence[int]) -> Schedule:
    """So many micro-batches in flight on each stage."""
    orders = enumerate(_lane(schedule, stage, count) for stage, count in enumerate(in_flight))
    return dataclasses.replace(schedule, lanes={(stage, 0): TaskList(order) for stage, order in orders})


def _lane(schedule: Schedule, stage: int, in_flight: int) -> Iterator[Task]:
    count = schedule.microbatches
    order = places(count, min(in_flight, count), 0)
    for task in TaskList(lane_codes((stage, stage, stage), np.arange(count), order)):
        yield task
        if task.kind == "dW":
            yield Task("U", stage, task.microbatch)
