"""Makes ZB-H2 (Zero Bubble, arXiv 2401.10241, section 2.2): twice the memory, no bubble with equal costs."""

from __future__ import annotations

import numpy as np

from tf_ooo.planning.building.choice import quickest, span_s
from tf_ooo.planning.building.pipeline import Pace, StagedLayers, paced
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import one_f_one_b, zb_h1
from tf_ooo.planning.policies.policy import BY_COSTS, Policy

NAME = "zb_h2"


def make(problem: Problem) -> Schedule:
    """Return ZB-H2; on p equal stages its bubble is (p - 1)(F + dO - 2 dW).

    That holds if dW <= F, 2 dW <= F + dO and m >= 2p - 1, for repeated steps: device i begins and ends later
    than device 0, and only its own updates hold its next step back.  The peak is 2p - 1 activations. For m <=
    p the step takes (m + p - 1)(F + dO) + dW, as in ZB-H1.  With unequal stages ZB-H1's pace, or no delay at
    all, may be better; the quickest is taken.
    """
    stages = StagedLayers.of(problem)
    paces = (pace(problem), zb_h1.pace(problem), one_f_one_b.pace(problem))
    return quickest(stages, [paced(NAME, stages, p) for p in paces], span_s)


def pace(problem: Problem) -> Pace:
    """Return the pace: twice 1F1B's forwards, less one; device i delays 2i dW. ZB-H1's if m <= p."""
    if problem.microbatches <= problem.devices:
        return zb_h1.pace(problem)
    device = np.arange(problem.devices)
    return Pace(2 * (problem.devices - device) - 1, 2 * device)


POLICY = Policy(NAME, ("pipeline",), make, needs=BY_COSTS)
