"""Allocates layers modulo devices, with gradient fast-forwarding (EuroSys 2022, section on pipelines)."""

from __future__ import annotations

from collections.abc import Iterator

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import fastest_of_cuts
from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import ListChoices, listed_each
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import MANY_TASKS, Chunks, Needs, Policy

NAME = "modulo"
# List scheduling and simulation take some 20 us a task; so many are tried in some seconds.
_TASKS_TO_SEARCH = 200_000


def make(problem: Problem) -> Schedule:
    """Run layer group g on device g mod p; dO before F before dW; at most p micro-batches in flight.

    Option ``group`` is the number of layers of a group (the last may have fewer).  If it is not given, sizes
    are tried by simulation: small ones have small bubbles and many messages.  If a cut is given, its stages
    are the groups.  A memory limit lowers the number of micro-batches in flight, down to one.
    """
    if problem.cut:
        return fastest_of_cuts([StagedLayers(problem, problem.cut)], _schedules)
    count = len(problem.layers)
    most = count // problem.devices
    if not most:
        raise OptionsError(f"{problem.devices} stages are more than the {count} layers; use fewer devices")
    size = problem.option("group", 0)
    groups = -(-count // size) if size else 0
    if size and groups < problem.devices:
        raise OptionsError(
            f"schedule {NAME!r}: group={size} makes {groups} groups of {count} layers, "
            f"fewer than the {problem.devices} devices; group can be 1 to {most}"
        )
    cuts = [
        tuple((first, min(first + group, count) - 1) for first in range(0, count, group))
        for group in ([size] if size else _sizes(problem, most))
    ]
    return fastest_of_cuts([StagedLayers(problem, cut) for cut in cuts], _schedules)


def _sizes(problem: Problem, most: int) -> Iterator[int]:
    """Yield group sizes to try: all that differ, or powers of two, not too small, if all take too long."""
    tasks = 3 * len(problem.layers) * problem.microbatches
    if tasks * most <= _TASKS_TO_SEARCH:
        yield from range(1, most + 1)
        return
    size = 1
    while size < most:
        if tasks // size <= _TASKS_TO_SEARCH:
            yield size
        size *= 2
    yield most


def _schedules(stages: StagedLayers) -> Iterator[Schedule]:
    in_flight = stages.most_in_flight(stages.problem.devices)
    choices = (ListChoices(in_flight, stage_first, by_room=False) for stage_first in (False, True))
    return listed_each(NAME, stages, choices)


POLICY = Policy(
    NAME,
    ("pipeline",),
    make,
    ("group",),
    needs=Needs(costs=True, link=True, chunks=Chunks((1, 2, 3, 4, 6, 8, 12), group_option="group")),
    auto_tasks=MANY_TASKS,
)
