"""Makes ZB-H1 (Zero Bubble, arXiv 2401.10241, section 2.1): 1F1B's memory, dW in the bubbles."""

from __future__ import annotations

import numpy as np

from tf_ooo.planning.building.choice import quickest
from tf_ooo.planning.building.pipeline import Pace, StagedLayers, paced
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import one_f_one_b
from tf_ooo.planning.policies.policy import BY_COSTS, Policy

NAME = "zb_h1"


def make(problem: Problem) -> Schedule:
    """Return ZB-H1; its bubble is (p - 1)(F + dO - dW) on p equal stages if dW <= F and dW <= dO.

    In general it is (p - 1)(F + dO - min(F, dO, dW)) for m >= p micro-batches.  For m <= p and such dW the
    step takes (m + p - 1)(F + dO) + dW.  A device stores p activations.  Device i delays i dW, which fill its
    idle time at the end.  If that costs more than it gives, with unequal stages, no dW is delayed. That is
    never slower than 1F1B: the order is the same, but dO is sent before dW.
    """
    stages = StagedLayers.of(problem)
    return quickest(stages, [paced(NAME, stages, p) for p in (pace(problem), one_f_one_b.pace(problem))])


def pace(problem: Problem) -> Pace:
    """Return the pace: 1F1B's forwards; device i delays i dW."""
    device = np.arange(problem.devices)
    return Pace(problem.devices - device, device)


POLICY = Policy(NAME, ("pipeline",), make, needs=BY_COSTS)
