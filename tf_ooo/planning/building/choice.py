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
    """The longest time in seconds from a device's first task to its last.

    The cost of a schedule in Zero Bubble (arXiv 2401.10241, section 3): steps follow without a barrier,
    so a device that begins late may end late.
    """
    spans = [0.0]
    for _, piece in timeline.lane_slices():
        if piece.stop > piece.start:
            spans.append(float(timeline.end_s[0, piece].max() - timeline.start_s[0, piece].min()))
    return max(spans)


def quickest(
    stages: StagedLayers, candidates: Sequence[Schedule], cost: Callable[[Timeline], float] = makespan_s
) -> Schedule:
    """The first candidate where stages are equal and closed forms hold; else :func:`fastest`.

    Above a million tasks the first one is taken unseen.
    """
    if stages.uniform or 3 * stages.problem.microbatches * len(stages.bounds) > TASKS_TO_SIMULATE:
        return candidates[0]
    return fastest(stages.problem, candidates, cost)


def fastest(
    problem: Problem, candidates: Sequence[Schedule], cost: Callable[[Timeline], float] = makespan_s
) -> Schedule:
    """The candidate with the lowest cost within the memory limit; the leanest where none is within.

    Of equals the one with the shortest span is taken.
    """
    limit = np.inf if problem.memory_limit_bytes is None else problem.memory_limit_bytes
    rows = []
    for number, schedule in enumerate(candidates):
        timeline = simulate(schedule, problem.layers, problem.link)
        peak = max(timeline.peak_bytes, default=0)
        within = peak <= limit
        rows.append((not within, cost(timeline) if within else peak, span_s(timeline), number))
    return candidates[min(rows)[-1]]
