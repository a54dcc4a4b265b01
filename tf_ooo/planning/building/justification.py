"""Double justification of a pipeline's schedule (Valls, Ballestin and Quintanilla 2005).

All tasks are started anew as soon as they can, from the end of the step towards its beginning, those first
that ended last; then from the beginning again, those first that now begin first.  Each time tasks that hold
nothing up make way for those that do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_ooo.planning.building.step_tasks import StepTasks
from tf_ooo.planning.simulation.clock import Times


def justified(tasks: StepTasks, place: Sequence[int], times: Times) -> Times:
    """Place tasks again from the end, then from the beginning; often shorter, but now and then longer."""
    for reverse in (True, False):
        last_first: list[int] = np.argsort(-np.array(times.end_s), kind="stable").tolist()
        times = tasks.run(place, last_first, reverse)
    return times


def shortest_justified(tasks: StepTasks, place: Sequence[int], rounds: int) -> Times:
    """Return the shortest of so many rounds, from list scheduling on."""
    runs = [tasks.run(place, tasks.urgent)]
    for _ in range(rounds):
        runs.append(justified(tasks, place, runs[-1]))
    return min(runs, key=lambda times: times.makespan_s)
