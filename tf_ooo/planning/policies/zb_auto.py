"""Makes an automatic zero bubble schedule under a memory limit (arXiv 2401.10241, section 3.1)."""

from __future__ import annotations

import itertools

import numpy as np

from tf_ooo.planning.building.choice import TASKS_TO_SIMULATE, fastest
from tf_ooo.planning.building.lane_search import improved
from tf_ooo.planning.building.pipeline import StagedLayers, paced
from tf_ooo.planning.building.step_tasks import ListChoices, listed_each
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import one_f_one_b, zb_h1, zb_h2
from tf_ooo.planning.policies.policy import BY_COSTS, MANY_TASKS, Policy

NAME = "zb_auto"
_TASKS_TO_SEARCH = 100_000
_TASKS_TO_MOVE = 100
_PATIENCE = (0.0, 0.5, 1.0)


def make(problem: Problem) -> Schedule:
    """Return the quickest of handcrafted paces and list schedules, each within the memory limit.

    The time until all devices are done counts first, then the time of the slowest device.  The schedule is
    never slower than zb_h1 or zb_h2 within the same limit.  Without a limit, at most 2p - 1 micro-batches are
    in flight on a device, as in ZB-H2; only orders of up to 100 tasks are searched further. Above 100,000
    tasks only the handcrafted paces are compared; above a million ZB-H2's is taken without a memory limit,
    and ZB-H1's with one.
    """
    stages = StagedLayers.of(problem)
    paces = (zb_h2.pace(problem), zb_h1.pace(problem), one_f_one_b.pace(problem))
    candidates = [paced(NAME, stages, pace) for pace in paces]
    tasks = 3 * problem.microbatches * problem.devices
    if tasks > TASKS_TO_SIMULATE:
        return candidates[0 if problem.memory_limit_bytes is None else 1]
    if tasks > _TASKS_TO_SEARCH:
        return fastest(problem, candidates)
    most, ahead = 2 * problem.devices - 1, problem.devices - np.arange(problem.devices)
    pairs = itertools.product((ahead, 2 * ahead - 1, np.full(problem.devices, most)), _PATIENCE)
    choices = (ListChoices(most, patience=wait, ahead=ahead) for ahead, wait in pairs)
    first = fastest(problem, [*candidates, *listed_each(NAME, stages, choices)])
    if tasks > _TASKS_TO_MOVE:
        return first
    return fastest(problem, [first, *(improved(stages, start) for start in (first, *candidates))])


POLICY = Policy(NAME, ("pipeline",), make, needs=BY_COSTS, auto_tasks=MANY_TASKS)
