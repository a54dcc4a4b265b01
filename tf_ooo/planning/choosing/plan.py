"""Makes one :class:`Plan` for every mode: policies are tried on paper, and the best schedule is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.planning.building.choice import span_s, steps_to_show
from tf_ooo.planning.building.stages import merged, one_each
from tf_ooo.planning.choosing.recomputing import NONE, recomputed, search
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES, Policy
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

# With a limit, though none that matters, policies search less.
NO_LIMIT = 1 << 62
# Above this, simulating takes most of the time of planning; simulate() tells what plan() leaves open.
_TASKS_TO_PREDICT = 2_000_000
# Above this, several steps take too long to simulate.
_TASKS_TO_REPEAT = 300_000


def step_s(timeline: Timeline) -> float:
    """Return a step's predicted seconds: the period of repeated steps; if asynchronous, a whole batch's.

    Above 300,000 tasks: the longest time from a device's first task to its last (arXiv 2401.10241, section
    3).
    """
    schedule = timeline.schedule
    if schedule.asynchronous:
        return timeline.steady_step_s * schedule.microbatches
    if timeline.steps > 1 or timeline.start_s.size <= _TASKS_TO_REPEAT:
        return timeline.steady_step_s
    one_lane_each = len(schedule.lanes) == schedule.devices and not schedule.barrier
    return span_s(timeline) if one_lane_each else timeline.makespan_s


@dataclass(frozen=True)
class StepTime:
    """Says how to compute a step's seconds; ``steps`` None: simulate as many as that takes."""

    step_s: Callable[[Timeline], float] = step_s
    steps: int | None = None

    def steps_of(self, schedule: Schedule) -> int:
        return steps_to_show(schedule) if self.steps is None else self.steps


STEADY = StepTime()


@dataclass(frozen=True)
class Trial:
    """Holds a schedule on paper, without predictions."""

    schedule: Schedule
    problem: Problem
    step_time: StepTime = STEADY

    @cached_property
    def timeline(self) -> Timeline:
        """Return the simulated timeline, computed once."""
        steps = self.step_time.steps_of(self.schedule)
        return simulate(self.schedule, self.problem.layers, self.problem.link, steps)

    @cached_property
    def step_s(self) -> float:
        # Rounds of asynchronous steps run several in a call.
        each_s = 0.0 if self.schedule.asynchronous else self.problem.link.step_s
        return self.step_time.step_s(self.timeline) + each_s

    @property
    def makespan_s(self) -> float:
        """Return seconds from the start of the first step to its end."""
        return float(self.timeline.end_s[0].max(initial=0.0))

    @property
    def peak_bytes(self) -> int:
        return max(self.timeline.peak_bytes, default=0)

    def of(self, steps: int) -> Trial:
        """Return the same trial with so many steps: this one if it has as many."""
        if self.step_time.steps_of(self.schedule) == steps:
            return self
        return dataclasses.replace(self, step_time=dataclasses.replace(self.step_time, steps=steps))

    @property
    def kept_limit_bytes(self) -> int:
        """Return the lowest limit that the schedule keeps, as :meth:`Problem.limit_of`."""
        return self.problem.limit_of(self.timeline.peak_bytes)

    @property
    def keeps_limit(self) -> bool:
        """Return whether each device stays within its limit; without a limit nothing is simulated."""
        return self.problem.memory_limit_bytes is None or self.problem.keeps_limit(self.timeline.peak_bytes)

    def predicted(self) -> Schedule:
        """Return the schedule with its predictions, unless simulating would take long."""
        if "timeline" not in vars(self) and len(self.schedule.tasks) > _TASKS_TO_PREDICT:
            return self.schedule
        return dataclasses.replace(
            self.schedule, predicted_step_s=self.step_s, predicted_peak_bytes=self.peak_bytes
        )


AsRun = Callable[[Schedule], Schedule] | None

# So many reasons fit into a line.
_MOST_REASONS = 3


@dataclass(frozen=True)
class Candidate:
    """Describes a tried policy; if it cannot be taken, ``trial`` is None and ``reason`` says why.

    ``unlimited``: its trial without the memory limit, if that was made, too.
    """

    name: str
    problem: Problem
    trial: Trial | None = None
    step_s: float = float("inf")
    reason: str = ""
    error: OOOError | None = None
    unlimited: Trial | None = None


Rank = Callable[[Candidate], tuple[float, ...]]


@dataclass(frozen=True)
class Plan:
    """Holds the chosen schedule on paper, all that was compared, and ``why``, if it is not the fastest."""

    trial: Trial
    candidates: tuple[Candidate, ...] = ()
    why: str = ""

    @cached_property
    def schedule(self) -> Schedule:
        """Return the schedule with its predictions, which only plans of millions of tasks lack."""
        predicted, problem = self.trial.predicted(), self.problem
        if problem.bounds:  # its stages are numbered, not its layers
            return predicted
        return dataclasses.replace(predicted, recompute=problem.recomputed)

    @property
    def timeline(self) -> Timeline:
        return self.trial.timeline

    @property
    def problem(self) -> Problem:
        return self.trial.problem

    @property
    def step_s(self) -> float:
        return self.trial.step_s


def policy_named(name: str, mode: str | None = None) -> Policy:
    """Return a row of the table.  OptionsError names the existing ones."""
    if not isinstance(name, str) or name not in POLICIES:
        raise OptionsError(f"schedule={name!r:.80} is not accepted; accepted: auto, {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if mode is not None and mode not in policy.modes:
        raise OptionsError(f"schedule={name!r} is one of mode {' or '.join(policy.modes)}, not {mode!r}")
    return policy


def as_cut(schedule: Schedule, problem: Problem) -> tuple[Schedule, Problem]:
    """Return the schedule and problem with the policy's own stages as layers, if it cuts a model itself."""
    if not problem.model or schedule.stages in ((), one_each(problem.layers)):
        return schedule, problem
    bounds = tuple((problem.bounds[first][0], problem.bounds[last][1]) for first, last in schedule.stages)
    stages = merged(problem.model, bounds, problem.microbatches)
    cut = dataclasses.replace(problem, layers=stages, bounds=bounds, recomputed=(), plain=())
    return dataclasses.replace(schedule, stages=one_each(stages)), recomputed(cut, problem.recomputed)


def as_asked(
    policy: Policy,
    problem: Problem,
    step_time: StepTime = STEADY,
    as_run: AsRun = None,
    to_beat_s: float = math.inf,
    unlimited: Trial | None = None,
) -> Plan:
    """Return the plan of one policy's schedule, or of its leanest one.

    OptionsError: an option or problem that it does not take; MemoryLimitError: it is above the limit.

    Args:
        policy, problem, step_time: what is planned, and how the seconds of a step are computed.
        as_run: turns its schedule into the one that the mode runs.
        to_beat_s: the search is shorter, or left out, if it would hardly be faster than this.
        unlimited: its trial without the memory limit, if that was made already.
    """
    for name, value in problem.options.items():
        if name not in policy.options:
            known = f"its options are {', '.join(policy.options)}" if policy.options else "it has no options"
            raise OptionsError(f"schedule {policy.name!r}: {name}={value!r} is unknown; {known}")

    def made_for(asked: Problem, of: Problem) -> Trial:
        schedule = policy.make(asked)
        return Trial(*as_cut(schedule if as_run is None else as_run(schedule), of), step_time)

    def within(asked: Problem) -> Trial:
        trial = made_for(asked, asked)
        if trial.keeps_limit:
            return trial
        lean = made_for(dataclasses.replace(asked, memory_limit_bytes=0), asked)
        if not lean.keeps_limit:
            raise asked.over_limit(lean.kept_limit_bytes)
        return lean

    def free(asked: Problem) -> Trial:
        if unlimited is not None and not asked.recomputed:
            return unlimited
        return made_for(dataclasses.replace(asked, memory_limit_bytes=None), asked)

    return Plan(within(problem) if problem.recompute == NONE else search(problem, within, free, to_beat_s))


def tried(
    policy: Policy,
    problem: Problem,
    step_time: StepTime = STEADY,
    as_run: AsRun = None,
    to_beat_s: float = math.inf,
    unlimited: Trial | None = None,
) -> Candidate:
    """Try a policy as :func:`as_asked` does; return a failure as a candidate with its reason."""
    try:
        trial = as_asked(policy, problem, step_time, as_run, to_beat_s, unlimited).trial
        return Candidate(policy.name, trial.problem, trial, trial.step_s, unlimited=unlimited)
    except MemoryLimitError as error:
        return Candidate(policy.name, problem, reason=f"needs {error.smallest_bytes} bytes", error=error)
    except OOOError as error:
        return Candidate(policy.name, problem, reason=str(error), error=error)


def shortest(candidate: Candidate) -> tuple[float, ...]:
    """Return the key of ``auto``: the step's seconds, among equals when it ends, then memory."""
    trial = candidate.trial
    if trial is None:
        return float("inf"), float("inf"), 0
    # The rounding of sums must not decide.
    return float(f"{trial.step_s:.9g}"), float(f"{trial.makespan_s:.9g}"), trial.peak_bytes


def choose(candidates: Sequence[Candidate], rank: Rank = shortest, why: str = "") -> Plan:
    """Return the plan of lowest rank, the first of equals. MemoryLimitError, OptionsError: none."""
    trial = min(candidates, key=rank).trial
    if trial is None:
        errors = [candidate.error for candidate in candidates]
        if over := [error for error in errors if isinstance(error, MemoryLimitError)]:
            raise min(over, key=lambda error: error.smallest_bytes or 0)
        raise OptionsError(f"no schedule is possible: {_reasons(candidates)}")
    return Plan(trial, tuple(candidates), why)


def _reasons(candidates: Sequence[Candidate]) -> str:
    """Say why none can be taken, each reason once; of many, the most common, and how to see the others."""
    names: dict[str, list[str]] = {}
    for candidate in candidates:
        names.setdefault(candidate.reason, []).append(candidate.name)
    texts = [f"{', '.join(having)}: {reason}" for reason, having in names.items()]
    if len(texts) <= _MOST_REASONS:
        return "; ".join(texts)
    reason, most = max(names.items(), key=lambda item: len(item[1]))
    left = len(candidates) - len(most)
    return f"{', '.join(most)}: {reason}; ask for one of the {left} others by name to see why not"
