"""Plans from the costs of layers alone, without a model: what ``tf_ooo.plan`` and ``tf-ooo plan`` do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link, check_layers, is_number
from tf_ooo.errors import CostError, OptionsError
from tf_ooo.planning.building.by_name import Stages, bounds_of, check_stages
from tf_ooo.planning.choosing.plan import Candidate, Plan, as_asked, choose, policy_named, shortest, tried
from tf_ooo.planning.choosing.recompute import CHOICES, NONE
from tf_ooo.planning.model.problem import Problem, check_limits, most_and_less
from tf_ooo.planning.policies import POLICIES, Policy

# Micro-batches of a pipeline where none are asked for, in a fit too.
MICROBATCHES = 8


def microbatches_of(
    given: int | None, devices: int, schedule: str, mode: str | None, batch: int | None
) -> int:
    """Return the micro-batches that are asked for, or the usual ones: of a pipeline 8, of other modes one.

    A ``batch`` of fewer rows has one row in each.
    """
    if given is not None:
        return given
    modes = (mode,) if mode else policy_named(schedule).modes if schedule != "auto" else ("pipeline",)
    several = "pipeline" in modes and is_number(devices) and devices > 1
    rows = batch if isinstance(batch, int) and batch > 0 else MICROBATCHES
    return min(MICROBATCHES, rows) if several else 1


def plan_problem(problem: Problem, schedule: str = "auto", mode: str | None = None) -> Plan:
    """Return the plan of a named policy, or of the fastest of the mode; errors as of :func:`tf_ooo.plan`."""
    mode = mode_with_stages(problem, schedule, mode)
    if schedule == "auto":
        return choose(candidates(problem, mode))
    return as_asked(policy_named(schedule, mode), dataclasses.replace(problem, mode=mode))


def problem_of(
    layers: Sequence[LayerCosts],
    devices: int,
    microbatches: int,
    link: Link | None,
    memory_limit_bytes: int | list[int] | tuple[int, ...] | None,
    options: Mapping[str, Any] | None,
    stages: Stages | None = None,
    recompute: str = NONE,
) -> Problem:
    """Check what is to be planned; limit, ``stages`` and ``recompute`` are as in :func:`tf_ooo.plan`."""
    checked, between = check_layers(layers), Link() if link is None else link
    check_stages("stages", stages)
    names = [layer.name or str(number) for number, layer in enumerate(checked)]
    cut = () if stages is None else bounds_of(names, stages)
    limits: list[int] | tuple[int, ...] | None = None
    if isinstance(memory_limit_bytes, (list, tuple)):
        limits, memory_limit_bytes = memory_limit_bytes, None
    problem = Problem(
        checked,
        devices,
        microbatches,
        between,
        memory_limit_bytes,
        options=options or {},
        recompute=recompute,
        cut=cut,
    )
    check_problem(problem)
    if limits is None:
        return problem
    for limit in limits:
        _check_limit(limit)
    check_limits(limits, devices)
    most_bytes, less_bytes = most_and_less(limits)
    return dataclasses.replace(problem, memory_limit_bytes=most_bytes, less_bytes=less_bytes)


def mode_with_stages(problem: Problem, schedule: str, mode: str | None) -> str | None:
    """The mode: pipeline where stages are given.  OptionsError: another is asked for, or has no stages.

    Nor can the asynchronous mode recompute, in which one dO has two halves on two processors.
    """
    named = policy_named(schedule, mode).modes if schedule != "auto" else ()
    if problem.link.speeds and ((mode,) if mode else named) == ("data_parallel",):
        raise OptionsError(
            "speeds are of a pipeline's devices: workers of data parallel training wait for the slowest, so "
            "give its costs"
        )
    if problem.recompute != NONE and "layerpipe" in (mode, *named):
        raise OptionsError(f"recompute={problem.recompute!r} is not for mode='layerpipe'")
    if not problem.cut:
        return mode
    if mode not in (None, "pipeline"):
        raise OptionsError(f"stages= are a pipeline's, mode={mode!r} has none")
    if schedule != "auto":
        policy_named(schedule, "pipeline")
    return "pipeline"


def candidates(
    problem: Problem, mode: str | None = None, on_progress: Callable[[str], None] | None = None
) -> list[Candidate]:
    """Every schedule of a mode (None: the usual one), simulated, the fastest first, the slow to plan last."""
    wanted = usual_mode(problem, mode)

    def rows_of(policies: Sequence[Policy]) -> Iterable[Candidate]:
        for policy in policies:
            if on_progress is not None:
                on_progress(policy.name)
            options = {name: value for name, value in problem.options.items() if name in policy.options}
            yield tried(policy, dataclasses.replace(problem, options=options, mode=wanted))

    return sorted(auto_candidates(policies_of(wanted), problem, rows_of), key=shortest)


def auto_candidates(
    policies: Sequence[Policy], problem: Problem, rows_of: Callable[[Sequence[Policy]], Iterable[Candidate]]
) -> list[Candidate]:
    """Return the candidates that ``auto`` compares; those it leaves out have a reason.

    It leaves out policies that take long to plan so many tasks, where another is possible.
    """
    tasks = 3 * problem.devices * problem.microbatches
    slow = [policy for policy in policies if policy.auto_tasks is not None and tasks > policy.auto_tasks]
    rows = list(rows_of([policy for policy in policies if policy not in slow]))
    if any(row.trial is not None for row in rows):
        why = f"not tried: takes long for {tasks:,} tasks; ask for it by name"
        rows += [Candidate(policy.name, problem, reason=why) for policy in slow]
    else:
        rows += rows_of(slow)
    return rows


def usual_mode(problem: Problem, mode: str | None) -> str:
    """Return the mode that is asked for, or the usual one: pipeline if there are several devices."""
    return mode or ("pipeline" if problem.devices > 1 else "single_device")


def policies_of(mode: str) -> list[Policy]:
    """Return the policies of a mode.  OptionsError names the modes there are."""
    policies = [policy for policy in POLICIES.values() if mode in policy.modes]
    if not policies:
        modes = sorted({mode for policy in POLICIES.values() for mode in policy.modes})
        raise OptionsError(f"mode={mode!r} is not accepted; accepted: {', '.join(modes)}")
    return policies


def _check_limit(limit: object) -> None:
    if not is_number(limit) or not limit > 0:
        raise OptionsError(f"memory_limit_bytes must be above 0, got {limit!r}")


def check_problem(problem: Problem) -> None:
    """OptionsError unless the numbers are whole and above 0."""
    for name in ("devices", "microbatches"):
        value = getattr(problem, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionsError(f"{name} must be a whole number of at least 1, got {value!r}")
    if problem.recompute not in CHOICES:
        raise OptionsError(
            f"recompute={problem.recompute!r:.80} is not accepted; accepted: {', '.join(map(repr, CHOICES))}"
        )
    if problem.memory_limit_bytes is not None:
        _check_limit(problem.memory_limit_bytes)
    if not isinstance(problem.link, Link):
        raise CostError(f"link must be a tf_ooo.Link, got {problem.link!r:.80}")
