"""Is a schedule complete, and can it run at all?"""

from __future__ import annotations

from collections.abc import Sequence

from tf_ooo.costs.layer_costs import LayerCosts, check_layers
from tf_ooo.planning.model.relation import Relation
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.completeness import check_complete, deadlock, never_start
from tf_ooo.planning.simulation.simulator import simulate


def validate(schedule: Schedule, layers: Sequence[LayerCosts] | None = None) -> None:
    """ScheduleError, which names what is violated: a task is missing or unknown, or waits for itself.

    Without ``layers`` it is checked for a chain, in which every task is needed that any stage has.
    """
    checked = None if layers is None else check_layers(layers)
    relation = Relation(schedule, checked)
    check_complete(relation, checked)
    if never_start(relation).any():
        raise deadlock(relation)
    if schedule.steps_ahead:
        ends = [relation.stages, *(last + 1 for _, last in schedule.stages)]
        simulate(schedule, checked or [LayerCosts(0, 0, 0)] * max(ends), steps=schedule.steps_ahead + 2)
