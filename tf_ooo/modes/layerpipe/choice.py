"""The schedule of ``mode="layerpipe"``, and what ``auto`` means there.

No TensorFlow here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.layerpipe_cuts import NO_SHARES, Shares
from tf_ooo.planning.choosing.candidates import predicted
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.pipedream import in_rounds
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.rewriting.plan import plan

# As far as predictions are off: a division of layers that saves less may just as well lose.
LEAST_GAIN = 1.1


def schedule_for(
    policy: str,
    layers: Sequence[LayerCosts],
    link: Link,
    devices: int,
    microbatches: int,
    lower_shares: Shares = NO_SHARES,
    **options: Any,
) -> tuple[Schedule, str]:
    """The schedule of a policy, as this mode runs it, and a line for the report where layers are left whole.

    Cuts inside of layers send their weights and stored inputs besides.  So ``auto`` takes them only where
    the predicted step is at least :data:`LEAST_GAIN` times as fast as PipeDream's.

    Args:
        lower_shares: how layers' dO can be divided, see ``schedulers.layerpipe``.

    Raises OptionsError: more devices than tasks.
    """

    def made(name: str) -> Schedule:
        given: dict[str, Any] = {"lower_shares": lower_shares} if name == "layerpipe" else {}
        schedule = plan(
            layers=list(layers),
            schedule=name,
            mode="layerpipe",
            devices=devices,
            microbatches=microbatches,
            link=link,
            **options,
            **given,
        )
        if schedule.fused_backward:  # more batches are on their way than in 1F1B
            return predicted(in_rounds(schedule), Problem(tuple(layers), devices, microbatches, link))
        return schedule

    if policy != "auto":
        return made(policy), ""
    divided = made("layerpipe")
    try:
        whole = made("pipedream")
    except OptionsError:  # more devices than layers
        return divided, ""
    step_s = [simulate(schedule, list(layers), link).steady_step_s for schedule in (whole, divided)]
    gain = step_s[0] / step_s[1] if step_s[1] else 1.0
    if gain >= LEAST_GAIN:
        return divided, ""
    return whole, (
        f"layers are left whole, as in PipeDream: dividing them is predicted to gain {gain:.2f}x, and "
        f"sends more; from {LEAST_GAIN}x on it is done (schedule='layerpipe' does it now)"
    )
