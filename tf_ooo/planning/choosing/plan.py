"""The schedule of a named policy, or the best of all, simulated, from the costs of layers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link, check_layers
from tf_ooo.errors import CostError, OptionsError
from tf_ooo.planning.choosing.candidates import best, candidates, make, policy_named, predicted
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule

DEFAULT_POLICY = "fast_forward"


def plan_layers(
    layers: Sequence[LayerCosts],
    schedule: str = DEFAULT_POLICY,
    memory_limit_bytes: int | None = None,
    *,
    devices: int = 1,
    microbatches: int = 1,
    link: Link | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Schedule:
    """An order of all tasks of a training step; arguments and errors as of :func:`tf_ooo.plan`."""
    between = Link() if link is None else link
    problem = Problem(check_layers(layers), devices, microbatches, between, memory_limit_bytes, options or {})
    check_problem(problem)
    if schedule == "auto":
        return best(candidates(problem, mode), problem)
    return predicted(make(policy_named(schedule, mode), dataclasses.replace(problem, mode=mode)), problem)


def check_problem(problem: Problem) -> None:
    """OptionsError unless the numbers are whole and above 0."""
    for name in ("devices", "microbatches"):
        value = getattr(problem, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionsError(f"{name} must be a whole number of at least 1, got {value!r}")
    limit = problem.memory_limit_bytes
    if limit is not None and (
        isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0
    ):
        raise OptionsError(f"memory_limit_bytes must be above 0, got {limit!r}")
    if not isinstance(problem.link, Link):
        raise CostError(f"link must be a tf_ooo.Link, got {problem.link!r:.80}")
