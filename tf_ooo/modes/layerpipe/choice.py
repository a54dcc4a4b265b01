"""The schedule of ``mode="layerpipe"``, and what ``auto`` means there.

No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.planning.building.asynchronous import in_rounds
from tf_ooo.planning.choosing.on_paper import policies_of
from tf_ooo.planning.choosing.plan import Candidate, Plan, as_asked, choose, policy_named, tried
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import Policy

MODE = "layerpipe"
# As far as predictions are off: a division of layers that saves less may just as well lose.
LEAST_GAIN = 1.1


def make_plan(
    schedule: str,
    layers: Sequence[LayerCosts],
    link: Link,
    devices: int,
    microbatches: int,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a policy, as this mode runs it; it says why where layers are left whole.

    Cuts inside of layers send their weights and stored inputs besides.  So ``auto`` takes them only where
    the predicted step is at least :data:`LEAST_GAIN` times as fast as with whole layers.

    Args:
        schedule: a policy's name or auto.
        layers: their costs, of one batch.
        link: between devices.
        devices: how many.
        microbatches: batches of the plan.
        options: of policies; each is given those that it has.

    Raises:
        OptionsError: more devices than tasks.
    """
    problem = Problem(tuple(layers), devices, microbatches, link, mode=MODE)

    def asked(policy: Policy) -> Problem:
        own = {name: value for name, value in (options or {}).items() if name in policy.options}
        return dataclasses.replace(problem, options=own)

    if schedule != "auto":
        policy = policy_named(schedule, MODE)
        return as_asked(policy, asked(policy), as_run=_as_run)
    policies = [policy for policy in policies_of(MODE) if not policy.by_name]
    return _whole_or_divided([tried(policy, asked(policy), as_run=_as_run) for policy in policies])


def _as_run(schedule: Schedule) -> Schedule:
    """More batches of whole layers are on their way here than in 1F1B."""
    return in_rounds(schedule) if _keeps_layers_whole(schedule) else schedule


def _keeps_layers_whole(schedule: Schedule) -> bool:
    return schedule.fused_backward


def _whole_or_divided(candidates: Sequence[Candidate]) -> Plan:
    """The fastest that divides layers, unless the fastest that does not is nearly as fast."""
    trials = [candidate.trial for candidate in candidates if candidate.trial is not None]
    whole = [trial for trial in trials if _keeps_layers_whole(trial.schedule)]
    divided = [trial for trial in trials if not _keeps_layers_whole(trial.schedule)]
    errors = [candidate.error for candidate in candidates if candidate.error is not None]
    if not trials:  # the one that divides layers can use the most devices, and says how many
        raise errors[-1]
    if not whole or not divided:
        return choose(candidates)
    best, best_whole = (min(group, key=lambda trial: trial.step_s) for group in (divided, whole))
    step_s, whole_s = best.timeline.steady_step_s, best_whole.timeline.steady_step_s
    gain = whole_s / step_s if step_s else 1.0
    if gain >= LEAST_GAIN:
        return choose(candidates, lambda candidate: (candidate.trial is not best,))
    return choose(
        candidates,
        lambda candidate: (candidate.trial is not best_whole,),
        f"layers are left whole, as in PipeDream: dividing them is predicted to gain {gain:.2f}x, and "
        f"sends more; from {LEAST_GAIN}x on it is done (schedule={best.schedule.policy!r} does it now)",
    )
