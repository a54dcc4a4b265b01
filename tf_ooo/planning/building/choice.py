"""Choosing among schedules by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

# Above this, choosing takes longer than the choice is worth; the first candidate is taken.
TASKS_TO_SIMULATE = 1_000_000


def makespan_s(timeline: Timeline) -> float:
    """Seconds of a step that ends for all devices together."""
    return timeline.makespan_s


def span_s(timeline: Timeline) -> float:
    """The longest time from a device's first task to its last: steps follow each other without a barrier."""
    spans = [0.0]
    for _, piece in timeline.lane_slices():
        if piece.stop > piece.start:
            spans.append(float(timeline.end_s[0, piece].max() - timeline.start_s[0, piece].min()))
    return max(spans)


def quickest(
    stages: StagedLayers, candidates: Sequence[Schedule], cost: Callable[[Timeline], float] = makespan_s
) -> Schedule:
    """The first candidate, where closed forms hold or there are a million tasks; else :func:`fastest`."""
    if stages.uniform or 3 * stages.problem.microbatches * len(stages.bounds) > TASKS_TO_SIMULATE:
        return candidates[0]
    return fastest(stages.problem, candidates, cost)


def fastest(
    problem: Problem, candidates: Sequence[Schedule], cost: Callable[[Timeline], float] = makespan_s
) -> Schedule:
    """The lowest cost within the memory limit, else the least memory; of equals the shortest span."""
    limit = np.inf if problem.memory_limit_bytes is None else problem.memory_limit_bytes
    rows = []
    for number, schedule in enumerate(candidates):
        timeline = simulate(schedule, problem.layers, problem.link)
        peak = max(timeline.peak_bytes, default=0)
        within = peak <= limit
        rows.append((not within, cost(timeline) if within else peak, span_s(timeline), number))
    return candidates[min(rows)[-1]]
