"""Makes PipeDream: asynchronous 1F1B with weight stashing (SOSP 2019, doi 10.1145/3341301.3359646)."""

from __future__ import annotations

from tf_ooo.planning.building.layerpipe_cuts import whole_layers
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Policy


def make(problem: Problem) -> Schedule:
    """Return contiguous stages, the slowest as fast as possible, and among such cuts one that sends least.

    Each micro-batch is a step with its own update; a backward pass is one task, so a stage sends its
    gradient after its dW.  Stage s of p has at most p - s micro-batches in flight (NOAM = p) and keeps as
    many versions of its weights; stages are not replicated.  A memory limit lowers NOAM, down to 1.
    """
    return whole_layers("pipedream", problem)


POLICY = Policy("pipedream", ("layerpipe",), make)
