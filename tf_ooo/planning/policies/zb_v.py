"""Makes ZB-V: no bubbles at 1F1B's memory (Zero Bubble, arXiv 2401.10241, section 6)."""

from __future__ import annotations

from tf_ooo.planning.building import v_shape
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import MANY_TASKS, V_SHAPED, Policy


def make(problem: Problem) -> Schedule:
    """Return two stages on each of p devices, in a V.

    At most 2p stages' activations are stored on a device, as much as 1F1B's p stages that are twice as
    large.  If F, dO and dW take equally long, no device waits between its first and its last task; each
    starts one F after the one before.
    """
    return v_shape.make("zb_v", v_shape.ZB, problem)


POLICY = Policy("zb_v", ("pipeline",), make, needs=V_SHAPED, auto_tasks=MANY_TASKS)
