"""Schedules on paper, and choosing among them by time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import STEPS_TO_STEADY, Timeline

# Above this, choosing takes longer than the choice is worth; the first candidate is taken.
TASKS_TO_SIMULATE = 1_000_000
Cost = Callable[[Timeline], float]
# Seconds of a step that ends for all devices together.
makespan_s: Cost = attrgetter("makespan_s")


def span_s(timeline: Timeline) -> float:
    """The longest time from a device's first task to its last: steps follow each other without a barrier.

    The cost of a schedule in Zero Bubble (arXiv 2401.10241, section 3).
    """
    pieces = (piece for _, piece in timeline.lane_slices() if piece.stop > piece.start)
    spans = (timeline.end_s[0, piece].max() - timeline.start_s[0, piece].min() for piece in pieces)
    return float(max(spans, default=0.0))


def quickest(stages: StagedLayers, candidates: Sequence[Schedule], cost: Cost = makespan_s) -> Schedule:
    """The first candidate, where closed forms hold or there are a million tasks; else :func:`fastest`."""
    if stages.uniform or 3 * stages.problem.microbatches * len(stages.bounds) > TASKS_TO_SIMULATE:
        return candidates[0]
    return fastest(stages.problem, candidates, cost)


def fastest(problem: Problem, candidates: Sequence[Schedule], cost: Cost = makespan_s) -> Schedule:
    """Return the lowest cost within the memory limit, else the least memory; of equals the shortest span."""

    def order(schedule: Schedule) -> tuple[bool, float, float]:
        timeline = on_paper(problem, schedule)
        return *rank(problem, timeline, cost), span_s(timeline)

    return min(candidates, key=order)


def rank(problem: Problem, timeline: Timeline, cost: Cost = makespan_s) -> tuple[bool, float]:
    """(above the memory limit, bytes) or (within it, cost): the lowest is the best."""
    over = not problem.keeps_limit(timeline.peak_bytes)
    return over, problem.limit_of(timeline.peak_bytes) if over else cost(timeline)


def steps_to_show(schedule: Schedule) -> int:
    """Return one, or where steps overlap as many as show the steady state, in time and in memory."""
    overlap = schedule.mode in ("single_device", "data_parallel") and len(schedule.lanes) > 1
    return STEPS_TO_STEADY + schedule.steps_ahead if overlap else 1


def on_paper(problem: Problem, schedule: Schedule) -> Timeline:
    """Simulate a schedule as plan() does."""
    return simulate(schedule, problem.layers, problem.link, steps_to_show(schedule))


def within_limit(problem: Problem, schedule: Schedule) -> bool:
    """Return whether no device holds more bytes at once than its limit, steps overlapping."""
    return problem.memory_limit_bytes is None or not rank(problem, on_paper(problem, schedule))[0]


def first_within(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """Return the first schedule that keeps the memory limit, else the last."""
    for schedule in schedules:
        if within_limit(problem, schedule):
            break
    return schedule


def first_or_leanest(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """Return the first schedule that keeps the memory limit; where none does, the one that needs least."""
    rows = []
    for schedule in schedules:
        if problem.memory_limit_bytes is None:
            return schedule
        over, peak = rank(problem, on_paper(problem, schedule))
        if not over:
            return schedule
        rows.append((peak, schedule))
    return min(rows, key=lambda row: row[0])[1]
