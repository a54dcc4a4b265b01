"""PipeDream-2BW: PipeDream with two versions of the weights (ICML 2021, arXiv 2006.09503)."""

from __future__ import annotations

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.asynchronous import whole_layers
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Policy

_EVERY = "accumulate_steps"


def make(problem: Problem) -> Schedule:
    """PipeDream's stages and order, with one update for the gradients of several micro-batches.

    They all use the weights of one update before the newest: two versions, whatever the depth.  Option
    ``accumulate_steps``: how many micro-batches; not given: as many as there are stages, the fewest for which
    two versions do.

    Raises:
        OptionsError: fewer micro-batches than stages, or more stages than layers.
    """
    every = problem.option(_EVERY, problem.devices, least=1)
    if every < problem.devices:
        raise OptionsError(
            f"accumulate_steps={every} is below the {problem.devices} stages: their micro-batches would need "
            "more than two versions of the weights"
        )
    return whole_layers("pipedream_2bw", problem, every)


POLICY = Policy(
    "pipedream_2bw",
    ("layerpipe",),
    make,
    (_EVERY,),
    by_name="updates once for several micro-batches: ask for it by name",
)
