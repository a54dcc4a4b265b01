"""Makes GPipe (arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from tf_ooo.planning.building.pipeline import Pace, StagedLayers, paced
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Policy


def make(problem: Problem) -> Schedule:
    """Return GPipe: with m micro-batches on p equal stages a step takes (m + p - 1)(F + dO + dW).

    Each stage stores m activations.  Nothing can be tuned: above the memory limit there is no GPipe.
    """
    stages = StagedLayers.of(problem)
    ahead = np.full(problem.devices, problem.microbatches)
    return paced("gpipe", stages, Pace(ahead, 0 * ahead), fused=True, limited=False)


POLICY = Policy("gpipe", ("pipeline",), make)
