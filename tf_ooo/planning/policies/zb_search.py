"""Searches cuts, the devices of stages and the order of all tasks together (ours)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from operator import attrgetter

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import fastest, makespan_s, on_paper, within_limit
from tf_ooo.planning.building.lane_search import improved
from tf_ooo.planning.building.stage_search import Assigned, Owner, StageSearch
from tf_ooo.planning.building.step_tasks import ROUNDS, ListChoices, listed
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import MANY_TASKS, Chunks, Needs, Policy

NAME = "zb_search"
# Two changes for each task are tried, at least a few; fewer if all changes together would place so many tasks
# that it takes seconds.
_FEW_CHANGES, _MOST_TASKS = 200, 1_000_000
_CHUNKS = 3
# So many cuts and placements are compared where nothing is searched.
_FEW_STARTS = 2
# With a memory limit several problems are searched.
_WITH_LIMIT = 0.25
# So many walks share the changes where forwards wait for room, from the best cuts and placements on.
_WALKS = 2
# The best of so small problems are searched further.
_FEW_TASKS, _MOVED_TASKS, _PATIENCE = 100, 1000, (0.5, 1.0)
# The best assignments are searched from so many random orders each.
_LIKELY, _SHUFFLED = 2, 10


def make(problem: Problem) -> Schedule:
    """Return the fastest of the cuts, devices and orders that were tried, within the memory limit.

    A device has any stages, on average up to four, so that layers of unequal costs need no equal stages. At
    most 2p micro-batches are in flight on a stage, fewer where memory has no room for them. Cuts and devices
    are searched for 4p micro-batches at most.

    OptionsError: there are fewer layers than devices.
    """
    units, devices = len(problem.cut or problem.layers), problem.devices
    if units < devices:
        raise OptionsError(f"{devices} stages are more than the {units} layers; use fewer devices")
    few = problem.shortened
    tasks = 3 * few.microbatches * min(units, _CHUNKS * devices)
    searched = _searched(problem, few, tasks)
    if within_limit(problem, searched):
        return searched
    starts = StageSearch(few, 1, waits=True).starts(_FEW_STARTS if problem.recomputed else None)
    lean = _for_all(problem, min(starts, key=attrgetter("rank"))).schedule(NAME)
    if problem.recomputed or within_limit(problem, lean):
        return lean
    # A search for time may end at a leaner cut.
    return fastest(problem, [lean, searched, make(replace(problem, memory_limit_bytes=None))])


def _searched(problem: Problem, few: Problem, tasks: int) -> Schedule:
    """Search for ``few`` micro-batches; ``tasks``: about how many tasks these have."""
    effort, devices, whole = _effort(problem), problem.devices, few.microbatches == problem.microbatches
    small = effort == 1 and whole and tasks <= _FEW_TASKS
    changes = int(effort * min(max(_FEW_CHANGES, 2 * tasks), _MOST_TASKS // (2 * tasks)))
    limited = False
    for in_flight in (2 * devices, devices, -(-devices // 2), 1):
        starts = _starts(StageSearch(few, in_flight, small), changes)
        limited = limited or any(start.over_bytes > 0 for start in starts)
        best = min(starts, key=attrgetter("rank"))
        if best.over_bytes <= 0:
            best = best.search.run(best, changes)
            break
    if small:
        return _moved(best, tasks)
    ends = [_for_all(problem, end) for end in (best, *(_waiting(few, changes) if limited else ()))]
    within = [end for end in ends if end.over_bytes <= 0]
    return fastest(problem, [end.schedule(NAME) for end in within or ends[:1]])


def _starts(search: StageSearch, changes: int) -> list[Assigned]:
    return list(search.starts(None if changes else _FEW_STARTS))


def _waiting(few: Problem, changes: int) -> list[Assigned]:
    """Search orders in which forwards wait for room; none where one micro-batch does not fit."""
    in_flight = (2 * few.devices, few.devices) if changes else (2 * few.devices,)
    rows = [start for most in in_flight for start in _starts(StageSearch(few, most, waits=True), changes)]
    best_of: dict[Owner, Assigned] = {}
    for start in sorted(rows, key=attrgetter("rank")):
        best_of.setdefault(start.owner, start)
    likely = list(best_of.values())[: _WALKS if changes else 1]
    return [start.search.run(start, changes // _WALKS) for start in likely if start.over_bytes <= 0]


def _moved(best: Assigned, tasks: int) -> Schedule:
    """Return the best result of moving tasks in found, listed and random orders of a small problem.

    Moving tasks from the best order may end too early; a random order leads elsewhere.
    """
    search = best.search
    nearly = sorted(search.found.values(), key=lambda found: found.within_s)[: _MOVED_TASKS // tasks]
    moved = [(found.owner, improved(found.stages, found.schedule(NAME))) for found in nearly]
    for found, wait in itertools.product(nearly[: len(nearly) // 3], _PATIENCE):
        order = listed(NAME, found.stages, ListChoices(search.in_flight, patience=wait, by_room=False))
        moved.append((found.owner, improved(found.stages, order)))
    moved.sort(key=lambda row: makespan_s(on_paper(search.problem, row[1])))
    schedules = [best.schedule(NAME), *(schedule for _, schedule in moved)]
    for owner in list(dict.fromkeys(owner for owner, _ in moved))[:_LIKELY]:
        orders = search.shuffled(search.found[owner], _SHUFFLED)
        schedules += [improved(order.stages, order.schedule(NAME)) for order in orders]
    return fastest(search.problem, schedules)


def _for_all(problem: Problem, best: Assigned) -> Assigned:
    """Return the order of all micro-batches, with stages on the devices found for few."""
    search = best.search
    if search.problem.microbatches == problem.microbatches:
        return best
    return StageSearch(problem, search.in_flight, waits=search.waits).ordered(best.owner, ROUNDS)


def _effort(problem: Problem) -> float:
    """Return a factor for the number of changes: smaller with a limit, 0 where layers run again."""
    if problem.recomputed:  # one of many sets of layers that are tried
        return 0.0
    return 1.0 if problem.memory_limit_bytes is None else _WITH_LIMIT


POLICY = Policy(
    NAME,
    ("pipeline",),
    make,
    needs=Needs(costs=True, link=True, chunks=Chunks(own=True)),
    auto_tasks=MANY_TASKS,
)
