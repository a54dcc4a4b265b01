"""Computes out of order on several streams of one device (EuroSys 2022, doi 10.1145/3492321.3519563)."""

from __future__ import annotations

from collections.abc import Mapping

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.joint import best_placement, check
from tf_ooo.planning.building.regions import read, schedule
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies.policy import Needs, Policy

NAME = "multi_stream"


def make(problem: Problem) -> Schedule:
    """Return the fastest of three: greedy filling, all dW at once on the sub stream, the stock order.

    Options: ``gains``, ``{(region, layer): seconds}`` with regions as text, ``"dO:5"`` or ``"F:3"`` for
    the next step's forward; ``placement``, a map ``{layer: "BWD j" | "FWD j" | "NO"}`` to use as it is;
    ``capture``, a :class:`~.regions.Capture`; ``delay``, False where a step ends when all
    its dW have, so that none can run beside the next step's forward.
    """
    check(problem, NAME)
    if "placement" not in problem.options:
        return schedule(NAME, problem, best_placement(problem))
    texts = problem.options["placement"]
    if not isinstance(texts, Mapping):
        raise OptionsError(f"placement must be a map from layers to texts, got {texts!r:.60}")
    return schedule(NAME, problem, read(texts, len(problem.layers)))


POLICY = Policy(
    NAME,
    ("single_device",),
    make,
    ("gains", "placement", "capture", "delay"),
    of_programs=("gains", "placement", "capture"),
    needs=Needs(costs=True, unless=("placement",), streams=True),
)
