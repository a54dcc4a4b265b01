"""Makes 1F1B (PipeDream-flush, arXiv 2006.09503): backward as early as possible, one forward for each."""

from __future__ import annotations

import numpy as np

from tf_ooo.planning.building.pipeline import Pace, StagedLayers, paced
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Policy


def make(problem: Problem) -> Schedule:
    """Return 1F1B; on p equal stages its bubble is (p - 1)(F + dO + dW) for any costs.

    Device i stores p - i activations.  A memory limit lowers the micro-batches in flight, down to one.
    """
    return paced("1f1b", StagedLayers.of(problem), pace(problem), fused=True)


def pace(problem: Problem) -> Pace:
    """Return the pace: device i runs p - i forwards ahead, and no dW is delayed."""
    ahead = problem.devices - np.arange(problem.devices)
    return Pace(ahead, 0 * ahead)


POLICY = Policy("1f1b", ("pipeline",), make)
