"""Simulates schedules on paper, and chooses among them by time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np

from tf_ooo.costs.layer_costs import layer_inputs
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.model.task import Floats
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import STEPS_TO_STEADY, Timeline

# Above this, choosing takes longer than the choice is worth; the first candidate is taken.
TASKS_TO_SIMULATE = 1_000_000
Cost = Callable[[Timeline], float]
# Seconds of a step that ends for all devices together.
makespan_s: Cost = attrgetter("makespan_s")


def span_s(timeline: Timeline) -> float:
    """Return the longest time from a device's first task to its last, as steps follow without a barrier.

    This is the cost of a schedule in Zero Bubble (arXiv 2401.10241, section 3).
    """
    pieces = (piece for _, piece in timeline.lane_slices() if piece.stop > piece.start)
    spans = (timeline.end_s[0, piece].max() - timeline.start_s[0, piece].min() for piece in pieces)
    return float(max(spans, default=0.0))


def quickest(stages: StagedLayers, candidates: Sequence[Schedule], cost: Cost = makespan_s) -> Schedule:
    """Return the first candidate if closed forms hold or it has a million tasks; else the :func:`fastest`."""
    if stages.uniform or 3 * stages.problem.microbatches * len(stages.bounds) > TASKS_TO_SIMULATE:
        return candidates[0]
    return fastest(stages.problem, candidates, cost)


def fastest(problem: Problem, candidates: Sequence[Schedule], cost: Cost = makespan_s) -> Schedule:
    """Return the cheapest within the memory limit, else the leanest; ties go to the shortest span."""

    return min(candidates, key=lambda schedule: _order(problem, schedule, cost))


Order = tuple[bool, float, float]


def _order(problem: Problem, schedule: Schedule, cost: Cost) -> Order:
    timeline = on_paper(problem, schedule)
    return *rank(problem, timeline, cost), span_s(timeline)


def fastest_of_cuts(
    cuts: Iterable[StagedLayers], schedules: Callable[[StagedLayers], Iterable[Schedule]]
) -> Schedule:
    """Return the :func:`fastest` of the schedules of all cuts; those that cannot win are not made."""
    best: tuple[Order, int, Schedule] | None = None
    for number, stages in sorted(enumerate(cuts), key=lambda row: least_s(row[1])):
        if best is not None and not best[0][0] and best[0][1] * (1 + 1e-9) < least_s(stages):
            break
        for schedule in schedules(stages):
            row = _order(stages.problem, schedule, makespan_s), number, schedule
            best = row if best is None else min(best, row, key=lambda each: each[:2])
    if best is None:
        raise ValueError("there are no cuts")
    return best[2]


def least_s(stages: StagedLayers) -> float:
    """Return a lower bound of the makespan: a device's work from its first forward on, or a link's."""
    devices = stages.problem.devices
    first_s = np.full(devices, np.inf)
    np.minimum.at(first_s, stages.devices, _begins_s(stages))
    speeds = np.array(stages.problem.link.speeds_of(stages.devices.tolist()))
    busy_s = stages.seconds.sum(axis=0) * stages.problem.microbatches + stages.sums("update_s") / speeds
    work_s = np.bincount(stages.devices, busy_s, devices)
    longest_s = float((first_s + work_s)[np.isfinite(first_s)].max(initial=0.0))
    return max(longest_s, _sending_s(stages))


def least_of_all_cuts_s(problem: Problem) -> float:
    """Return a lower bound for all cuts: all work spread evenly once devices can begin, or one layer's."""
    begins_s: list[float] = []
    for number in range(len(problem.layers)):
        read = layer_inputs(problem.layers, number)
        begins_s.append(max((begins_s[i] + problem.layers[i].forward_s for i in read), default=0.0))
    work_s = [layer.busy_s * problem.microbatches + layer.update_s for layer in problem.layers]
    speeds = sorted(problem.link.speeds_of(range(problem.devices)), reverse=True)
    first_s = [begin_s / speeds[0] for begin_s in sorted(begins_s)]
    idle = sum(speed * begin_s for speed, begin_s in zip(speeds, first_s, strict=False))
    alone_s = max((begin_s + s) / speeds[0] for begin_s, s in zip(begins_s, work_s, strict=True))
    return max((sum(work_s) + idle) / sum(speeds), alone_s)


def _begins_s(stages: StagedLayers) -> Floats:
    """Return the earliest start of the first F of each stage, float64 (stages,)."""
    # The order decides which of a device's stages takes a message that several read.
    forward_s, devices = (stages.seconds - stages.messages_s)[0].tolist(), stages.devices.tolist()
    link = stages.problem.link
    begins_s: list[float] = []
    for stage, read in enumerate(stages.inputs):
        sent_s = (
            0.0 if devices[i] == devices[stage] else link.between(devices[i], devices[stage]).seconds(size)
            for i, size in read
        )
        ready_s = (begins_s[i] + forward_s[i] + lag_s for (i, _), lag_s in zip(read, sent_s, strict=True))
        begins_s.append(max(ready_s, default=0.0))
    return np.array(begins_s)


def _sending_s(stages: StagedLayers) -> float:
    """Return the busiest link's seconds for outputs and gradients; a device receives each only once."""
    devices = stages.devices.tolist()
    largest: dict[tuple[str, int, int], float] = {}
    for stage, read in enumerate(stages.inputs):
        for source, size in read:
            if devices[source] != devices[stage]:
                for key in (("F", source, devices[stage]), ("dO", stage, devices[source])):
                    largest[key] = max(size, largest.get(key, 0.0))
    sent_s: Counter[tuple[int, int]] = Counter()
    for (_, stage, there), size in largest.items():
        link = stages.problem.link.between(devices[stage], there)
        sent_s[devices[stage], there] += link.occupied_s(size)  # type: ignore[assignment]
    return max(sent_s.values(), default=0.0) * stages.problem.microbatches


def rank(problem: Problem, timeline: Timeline, cost: Cost = makespan_s) -> tuple[bool, float]:
    """Return (True, bytes) above the memory limit, (False, cost) within it: the lowest is the best."""
    over = not problem.keeps_limit(timeline.peak_bytes)
    return over, problem.limit_of(timeline.peak_bytes) if over else cost(timeline)


def steps_to_show(schedule: Schedule) -> int:
    """Return 1, or where steps overlap the number that shows the steady state in time and memory."""
    overlap = schedule.mode in ("single_device", "data_parallel") and len(schedule.lanes) > 1
    return STEPS_TO_STEADY + schedule.steps_ahead if overlap else 1


def on_paper(problem: Problem, schedule: Schedule) -> Timeline:
    """Simulate a schedule as :func:`tf_ooo.plan` does."""
    return simulate(schedule, problem.layers, problem.link, steps_to_show(schedule))


def within_limit(problem: Problem, schedule: Schedule) -> bool:
    """Return whether each device stays within its memory limit while steps overlap."""
    return problem.memory_limit_bytes is None or not rank(problem, on_paper(problem, schedule))[0]


def first_within(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """Return the first schedule within the memory limit, else the last."""
    for schedule in schedules:
        if within_limit(problem, schedule):
            break
    return schedule


def first_or_leanest(problem: Problem, schedules: Iterable[Schedule]) -> Schedule:
    """Return the first schedule within the memory limit, else the one that needs least memory."""
    rows = []
    for schedule in schedules:
        if problem.memory_limit_bytes is None:
            return schedule
        over, peak = rank(problem, on_paper(problem, schedule))
        if not over:
            return schedule
        rows.append((peak, schedule))
    return min(rows, key=lambda row: row[0])[1]
