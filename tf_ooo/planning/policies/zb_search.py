"""Cuts, devices of stages and the order of all tasks are searched together (ours)."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import fastest
from tf_ooo.planning.building.lane_search import improved
from tf_ooo.planning.building.stage_search import StageSearch
from tf_ooo.planning.building.step_tasks import ListChoices, listed
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Chunks, Needs, Policy

NAME = "zb_search"
# Micro-batches for each device that show the steady state.
_PERIODS = 4
# Two changes for each task are tried, at least a few; above so many tasks that are placed for that in all,
# which takes seconds, fewer.
_FEW_CHANGES, _MOST_TASKS = 200, 1_300_000
_CHUNKS, _ROUNDS = 3, 6
# Where nothing is searched, so many cuts and placements are compared.
_FEW_STARTS = 2
# With a memory limit several problems are searched.
_WITH_LIMIT = 0.25
_MANY_TASKS = 30_000
# The best of so small problems are searched further.
_FEW_TASKS, _MOVED_TASKS, _PATIENCE = 100, 1000, (0.5, 1.0)


def make(problem: Problem) -> Schedule:
    """Return the fastest of the cuts, devices and orders that were tried, within the memory limit.

    A device has any stages, up to four for each device on average, so that layers of unequal costs need no
    equal stages.  At most 2p micro-batches are in flight on a stage, less where memory has no room for them.
    Cuts and devices are searched for 4p micro-batches at most.

    OptionsError: there are fewer layers than devices.
    """
    units, devices = len(problem.cut or problem.layers), problem.devices
    if units < devices:
        raise OptionsError(f"{devices} stages are more than the {units} layers; use fewer devices")
    count = min(problem.microbatches, _PERIODS * devices)
    few, tasks = replace(problem, microbatches=count), 3 * count * min(units, _CHUNKS * devices)
    changes = int(_effort(problem) * min(max(_FEW_CHANGES, 2 * tasks), _MOST_TASKS // (2 * tasks)))
    for in_flight in (2 * devices, devices, -(-devices // 2), 1):
        search = StageSearch(few, in_flight, small=_effort(problem) == 1 and tasks <= _FEW_TASKS)
        best = search.start(None if changes else _FEW_STARTS)
        if best.over_bytes <= 0:
            best = search.run(best, changes)
            break
    if count < problem.microbatches:
        best = StageSearch(problem, in_flight).ordered(best.owner, _ROUNDS)
    if not search.small:
        return best.schedule(NAME)
    nearly = sorted(search.found.values(), key=lambda found: found.within_s)[: _MOVED_TASKS // tasks]
    orders = [(found.stages, found.schedule(NAME)) for found in nearly]
    for (stages, _), wait in itertools.product(orders[: len(orders) // 3], _PATIENCE):
        orders.append((stages, listed(NAME, stages, ListChoices(in_flight, patience=wait, by_room=False))))
    moved = itertools.starmap(improved, orders)
    return fastest(problem, [best.schedule(NAME), *moved])


def _effort(problem: Problem) -> float:
    """Return a share of the changes: fewer with a limit, none where nothing fits or layers run again."""
    if problem.memory_limit_bytes is None:
        return 1.0
    return 0.0 if problem.recomputed or not problem.memory_limit_bytes else _WITH_LIMIT


POLICY = Policy(
    NAME,
    ("pipeline",),
    make,
    needs=Needs(costs=True, link=True, chunks=Chunks(own=True)),
    auto_tasks=_MANY_TASKS,
)
