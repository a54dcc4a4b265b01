"""Makes V-Min: a third of 1F1B's activations (Controllable Memory, arXiv 2405.15362)."""

from __future__ import annotations

from tf_ooo.planning.building import v_shape
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import MANY_TASKS, V_SHAPED, Policy


def make(problem: Problem) -> Schedule:
    """Return two stages on each of p devices, in a V.

    At most ``2 * ((p + 4) // 3)`` stages' activations are stored on a device (1F1B: as much as 2p).  If
    F, dO and dW take a tick each, the bubble for p > 2 is 4p - 7 ticks where 3 divides p, else 4p - 5
    (1F1B: 6p - 6).
    """
    return v_shape.make("v_min", v_shape.MIN, problem)


POLICY = Policy("v_min", ("pipeline",), make, needs=V_SHAPED, auto_tasks=MANY_TASKS)
