"""Plans from the costs of layers alone, and divides devices into replicas: ``tf_ooo.plan``."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_ooo.costs.layer_costs import LayerCosts, Link, check_layers, is_number
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import CostError, OOOError, OptionsError
from tf_ooo.planning.building.choice import least_of_all_cuts_s
from tf_ooo.planning.building.stages import Stages, bounds_of, check_stages
from tf_ooo.planning.choosing.figures import assumptions, one_device_s
from tf_ooo.planning.choosing.plan import (
    NO_LIMIT,
    STEADY,
    Candidate,
    Plan,
    StepTime,
    as_asked,
    choose,
    policy_named,
    shortest,
    tried,
)
from tf_ooo.planning.choosing.recomputing import ALL, AUTO, CHOICES, NONE, kept_within, slower_text
from tf_ooo.planning.model.problem import Problem, check_limits, less_of_places, most_and_less
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES, Policy
from tf_ooo.units import time_text

# Predictions are wrong by more.
_LEAST_GAIN = 0.005
# A plan so near to the bound is as good as any: predictions are wrong by more.
_NEAR = 1.01

# Micro-batches of a pipeline where none are asked for, in a fit too.
MICROBATCHES = 8


def fastest_first(asked: Sequence[tuple[Policy, Problem]], step_time: StepTime = STEADY) -> list[Candidate]:
    """Return a candidate for each policy and problem with a limit, in their order.

    Each is planned without the limit first, which takes little time.  The search within it (leaner schedules,
    layers that run again) takes policies that plan quickly first, then the others, each group from the
    fastest on.  Policies that without the limit are less than 0.5% faster than the best found within it are
    left out.
    """
    free = [
        tried(policy, dataclasses.replace(problem, memory_limit_bytes=NO_LIMIT, recompute=NONE), step_time)
        for policy, problem in asked
    ]
    rows: dict[int, Candidate] = {}
    best_s = math.inf

    def rank(number: int) -> tuple[bool, float]:
        """Return a key that puts policies whose search is short first, then the faster ones."""
        return asked[number][0].auto_tasks is not None, free[number].step_s

    for number in sorted(range(len(asked)), key=rank):
        (policy, problem), unlimited = asked[number], free[number]
        if (trial := unlimited.trial) is None:
            rows[number] = dataclasses.replace(unlimited, problem=problem)
        elif unlimited.step_s > best_s * (1 - _LEAST_GAIN):
            reason = slower_text(unlimited.step_s, best_s)
            rows[number] = Candidate(policy.name, problem, reason=reason)
        elif problem.recompute != ALL and (kept := kept_within(trial, problem)):
            rows[number] = dataclasses.replace(unlimited, problem=kept.problem, trial=kept)
        else:
            rows[number] = tried(policy, problem, step_time, to_beat_s=best_s, unlimited=trial)
        best_s = min(best_s, rows[number].step_s)
    return [rows[number] for number in range(len(asked))]


def microbatches_of(
    given: int | None, devices: int, schedule: str, mode: str | None, batch: int | None
) -> int:
    """Return the micro-batches that are asked for, or the usual ones: 8 in a pipeline, else 1.

    If a ``batch`` has fewer rows, each has one row.
    """
    if given is not None:
        return given
    modes = (mode,) if mode else policy_named(schedule).modes if schedule != "auto" else ("pipeline",)
    several = "pipeline" in modes and is_number(devices) and devices > 1
    rows = batch if isinstance(batch, int) and batch > 0 else MICROBATCHES
    return min(MICROBATCHES, rows) if several else 1


def plan_problem(problem: Problem, schedule: str = "auto", mode: str | None = None) -> Plan:
    """Return the plan of a named policy, or of the mode's fastest; errors as of :func:`tf_ooo.plan`."""
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
    problem = Problem(
        checked, devices, microbatches, between, options=options or {}, recompute=recompute, cut=cut
    )
    check_problem(problem)
    if memory_limit_bytes is None:
        return problem
    if not isinstance(memory_limit_bytes, (list, tuple)):  # one for all, which may be infinite
        _check_limit(memory_limit_bytes)
        return dataclasses.replace(problem, memory_limit_bytes=memory_limit_bytes)
    for limit in memory_limit_bytes:
        _check_limit(limit)
    check_limits(memory_limit_bytes, devices)
    most_bytes, less_bytes = most_and_less(memory_limit_bytes)
    return dataclasses.replace(problem, memory_limit_bytes=most_bytes, less_bytes=less_bytes)


def _check_limit(limit: object) -> None:
    if not is_number(limit) or not limit > 0:
        raise OptionsError(f"memory_limit_bytes must be above 0, got {limit!r}")


def mode_with_stages(problem: Problem, schedule: str, mode: str | None) -> str | None:
    """Return the mode: pipeline if stages are given. OptionsError: the asked mode differs, or has no stages.

    OptionsError also for layers that run again in the asynchronous mode, where a dO may be on two processors.
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
    """Return every schedule of a mode, simulated, the fastest first; slow to plan ones last."""
    wanted = usual_mode(problem, mode)

    def asked(policy: Policy) -> tuple[Policy, Problem]:
        if on_progress is not None:
            on_progress(policy.name)
        options = {name: value for name, value in problem.options.items() if name in policy.options}
        return policy, dataclasses.replace(problem, options=options, mode=wanted)

    def rows_of(policies: Sequence[Policy]) -> Iterable[Candidate]:
        if problem.recompute == AUTO and problem.memory_limit_bytes is not None:
            return fastest_first([asked(policy) for policy in policies])
        return (tried(*asked(policy)) for policy in policies)

    return sorted(auto_candidates(policies_of(wanted), problem, rows_of), key=shortest)


def auto_candidates(
    policies: Sequence[Policy], problem: Problem, rows_of: Callable[[Sequence[Policy]], Iterable[Candidate]]
) -> list[Candidate]:
    """Return the candidates that ``auto`` compares; those it leaves out have a reason.

    Policies that take long to plan so many tasks are left out if another one is possible. Cuts are searched
    only where that may help.
    """
    tasks = 3 * problem.devices * problem.microbatches
    slow = [policy for policy in policies if policy.auto_tasks is not None and tasks > policy.auto_tasks]
    own = [policy for policy in policies if policy.needs.chunks.own and policy not in slow]
    rows = list(rows_of([policy for policy in policies if policy not in (*slow, *own)]))
    if own:
        step_s, least_s = (
            min((row.step_s for row in rows), default=float("inf")),
            least_of_all_cuts_s(problem) + problem.link.step_s,
        )
        if step_s <= least_s * _NEAR:
            why = f"not tried: another takes {time_text(step_s)}, and no cut less than {time_text(least_s)}"
            rows += [Candidate(policy.name, problem, reason=why) for policy in own]
        else:
            rows += rows_of(own)
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


def check_problem(problem: Problem) -> None:
    """Raise OptionsError unless the numbers are whole and above 0."""
    for name in ("devices", "microbatches"):
        value = getattr(problem, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionsError(f"{name} must be a whole number of at least 1, got {value!r}")
    if problem.recompute not in CHOICES:
        raise OptionsError(
            f"recompute={problem.recompute!r:.80} is not accepted; accepted: {', '.join(map(repr, CHOICES))}"
        )
    if not isinstance(problem.link, Link):
        raise CostError(f"link must be a tf_ooo.Link, got {problem.link!r:.80}")


_MODE = "pipeline"
# Every split assumes this.
AVERAGED = "gradients of replicas are averaged after the step, not beside it"


@dataclass(frozen=True)
class Split:
    """Holds replicas of a pipeline that share a step's micro-batches; ``plan`` None: ``reason`` says why.

    Attributes:
        replicas, devices: how many replicas there are, and how many devices each has.
        plan: the plan of one replica.
        allreduce_s: seconds in which the device with most weights averages its gradients, after the step.
    """

    replicas: int
    devices: int
    plan: Plan | None = None
    allreduce_s: float = 0.0
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Return the seconds of one step with all of its micro-batches; infinite if impossible."""
        return float("inf") if self.plan is None else self.plan.step_s + self.allreduce_s

    @property
    def over_one_device(self) -> float | None:
        """Return the speed-up over one device that does the work of all replicas."""
        if self.plan is None or not self.step_s:
            return None
        schedule, layers = self.plan.trial.schedule, self.plan.problem.layers
        updates_s = sum(layer.update_s for layer in layers)
        batches_s = one_device_s(schedule, layers) - updates_s
        return (self.replicas * batches_s + updates_s) / self.step_s


def splits(problem: Problem) -> list[Split]:
    """Return every division of the problem's devices, the fastest first, impossible ones last."""
    counts = range(1, problem.devices + 1)
    rows = (_split(problem, count) for count in counts if problem.devices % count == 0)
    return sorted(rows, key=lambda split: (split.step_s, split.replicas))


def refuse_beside_splits(problem: Problem, schedule: str, mode: str | None) -> None:
    """Raise OptionsError for options that no comparison of divisions takes: a schedule, a mode, stages."""
    if schedule != "auto" or mode not in (None, _MODE) or problem.cut:
        raise OptionsError(
            "splits: each division has its own best schedule and cut: no schedule, mode or stages beside it"
        )


def best_split(problem: Problem, table: CostTable | None = None) -> Schedule:
    """Return the schedule of one replica of the fastest division; its ``workers`` are the replicas.

    Its ``predicted_step_s`` includes the averaging, for which it has no task; its ``assumptions`` list all
    divisions.  OptionsError: none is possible.
    """
    rows = splits(problem)
    best = rows[0]
    if best.plan is None:
        raise OptionsError(f"no division is possible: {'; '.join(dict.fromkeys(row.reason for row in rows))}")
    known = [f"{row.replicas} x {row.devices} {time_text(row.step_s)}" for row in rows if row.plan]
    known += [f"{row.replicas} x {row.devices} impossible" for row in rows if not row.plan]
    said = f"replicas x devices, the fastest is taken: {', '.join(known)}"
    assumed = (*assumptions(problem, table), said, AVERAGED)
    schedule = dataclasses.replace(best.plan.schedule, workers=best.replicas, assumptions=assumed)
    return dataclasses.replace(schedule, predicted_step_s=best.step_s)


def _split(problem: Problem, replicas: int) -> Split:
    devices = problem.devices // replicas
    own, left = divmod(problem.microbatches, replicas)
    if left or not own:
        text = f"{problem.microbatches} micro-batches cannot be dealt out evenly to {replicas} replicas"
        return Split(replicas, devices, reason=text)
    replica = dataclasses.replace(
        problem,
        devices=devices,
        microbatches=own,
        link=problem.link.of_replica(devices, replicas),
        less_bytes=less_of_places(problem.less_bytes, devices),
    )
    try:
        plan = choose(candidates(replica, _MODE))
    except OOOError as error:
        return Split(replicas, devices, reason=str(error))
    held_bytes = max(weight_bytes(plan.trial.schedule, problem).values(), default=0.0)
    return Split(replicas, devices, plan, problem.link.allreduce_s(held_bytes, replicas))


def weight_bytes(schedule: Schedule, problem: Problem) -> Counter[int]:
    """Return bytes of the weights that each device updates."""
    held: Counter[int] = Counter()
    for (device, _), tasks in schedule.lanes.items():
        stages = {task.stage for task in tasks if task.kind == "U"}
        numbers = (layer for stage in stages for layer in schedule.layers_of(stage))
        held[device] += sum(problem.layers[number].weight_bytes for number in numbers)  # type: ignore[assignment]
    return held
