"""One :class:`Plan` for every mode: policies are tried on paper, and the best of what they make is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.planning.building.choice import span_s, steps_to_show
from tf_ooo.planning.building.stages import merged, one_each, stage_of_layer
from tf_ooo.planning.model.problem import Problem, saved_bytes, with_recomputed
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES, Policy
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline
from tf_ooo.units import seconds_text

# Chooses the layers that run their forward again before their dO: as few seconds as keep a memory limit. A
# layer's bytes are worth most where they cost few seconds and where many micro-batches are stored. Whether
# some layers are enough, and what that costs, is simulated.

NONE, AUTO, ALL = "none", "auto", "all"
CHOICES = (AUTO, NONE, ALL)
# Sets of layers that are tried, each with more of them; layers that are left out again, and how many of them
# with another order.
_ROUNDS, _LEFT_OUT, _PLANNED_AGAIN = 12, 24, 12
# Leaving layers out again made no step faster by as much.
_CLOSE = 1.1
# Now and then a policy's schedule is faster within the limit than without, by less than this.
_BEHIND = 1.1
# With a limit, though none that matters, policies search less.
NO_LIMIT = 1 << 62
# Above so many only none and all are compared.
_TASKS_TO_SEARCH = 20_000
_STORES = {"F": 1, "dO": -1}

Make = Callable[[Problem], "Trial"]


def recomputed(problem: Problem, chosen: Collection[int]) -> Problem:
    """Return the same problem with these layers computed again."""
    again = tuple(sorted(chosen))
    layers = with_recomputed(problem.own_layers, again)
    if problem.model:
        layers = merged(layers, problem.bounds, problem.microbatches)
    return dataclasses.replace(problem, layers=layers, recompute=NONE, recomputed=again, plain=problem.layers)


def as_cut(schedule: Schedule, problem: Problem) -> tuple[Schedule, Problem]:
    """Make a policy's own stages the problem's layers, where those stand for ranges of a model."""
    if not problem.model or schedule.stages in ((), one_each(problem.layers)):
        return schedule, problem
    bounds = tuple((problem.bounds[first][0], problem.bounds[last][1]) for first, last in schedule.stages)
    stages = merged(problem.model, bounds, problem.microbatches)
    cut = dataclasses.replace(problem, layers=stages, bounds=bounds, recomputed=(), plain=())
    if problem.recomputed:
        cut = recomputed(cut, problem.recomputed)
    return dataclasses.replace(schedule, stages=one_each(stages)), cut


def worth_it(problem: Problem) -> list[int]:
    """The layers that keep less if they are computed again, the fewest seconds for their bytes first."""
    layers = problem.own_layers
    saved = {number: saved_bytes(layers, number) for number in range(len(layers))}
    numbers = [number for number, size in saved.items() if size > 0 and number not in problem.fixed]
    return sorted(numbers, key=lambda number: (layers[number].forward_s / saved[number], number))


def slower_text(free_s: float, to_beat_s: float) -> str:
    """Say why a schedule that is slower than another even without the memory limit is not searched for."""
    return (
        f"takes {seconds_text(free_s)} without the limit already, another {seconds_text(to_beat_s)} within it"
    )


def search(
    problem: Problem, within: Make, free: Make, to_beat_s: float = math.inf, unlimited: Trial | None = None
) -> Trial:
    """The fastest trial within the limit; without a limit, or where nothing is above it, nothing runs again.

    A limit hardly makes a schedule faster: more layers run again only as long as that is not much slower
    without the limit than what another policy found within it.

    Args:
        problem: with ``recompute`` all or auto.
        within: a policy's trial within the limit; raises MemoryLimitError where there is none.
        free: its trial, as if there were no limit.
        to_beat_s: another policy's step within the limit.  OptionsError where everything here is slower.
        unlimited: its trial with no limit that matters, where that was made already.
    """
    if problem.recompute == ALL:
        return within(recomputed(problem, worth_it(problem)))
    plain = dataclasses.replace(problem, recompute=NONE)
    if problem.memory_limit_bytes is None:
        return within(plain)
    unlimited = unlimited or free(plain)
    if plain.keeps_limit(unlimited.timeline.peak_bytes):
        return within(plain)
    trials: list[Trial] = []
    errors: list[MemoryLimitError] = []
    free_s, most_s = 0.0, to_beat_s * _BEHIND
    for chosen, trial in _growing(plain, unlimited, free):
        free_s = trial.step_s
        if free_s > most_s:
            break
        kept = _kept(trial, plain)
        try:
            trials.append(kept or within(recomputed(plain, chosen) if chosen else plain))
        except MemoryLimitError as error:
            errors.append(error)
        if kept:
            break
    if not trials and free_s > most_s:
        raise OptionsError(f"with as many layers again as it needs, {slower_text(free_s, to_beat_s)}")
    if not trials:
        raise min(errors, key=lambda error: error.smallest_bytes or 0)
    best = min(trials, key=_cost)
    return _fewer(plain, best, within) if best.step_s < to_beat_s * _CLOSE else best


def _kept(trial: Trial, problem: Problem) -> Trial | None:
    """Return a trial that was made without the limit as one within it, where it keeps it."""
    if not problem.keeps_limit(trial.timeline.peak_bytes):
        return None
    limited = dataclasses.replace(trial.problem, memory_limit_bytes=problem.memory_limit_bytes)
    return dataclasses.replace(trial, problem=limited)


def _cost(trial: Trial) -> tuple[float, int]:
    """The rounding of sums must not decide."""
    return float(f"{trial.step_s:.9g}"), len(trial.problem.recomputed)


def _growing(problem: Problem, trial: Trial, free: Make) -> Iterator[tuple[tuple[int, ...], Trial]]:
    """Yield sets of layers, and the trial without the limit: each with more layers where too much is stored.

    The first set is empty, with ``trial``; the last one has all that save bytes.
    """
    order, chosen = worth_it(problem), set[int]()
    yield (), trial
    for _ in range(_ROUNDS if len(trial.schedule.tasks) <= _TASKS_TO_SEARCH else 0):
        added = _enough(problem, trial, [number for number in order if number not in chosen])
        if not added:
            break
        chosen |= added
        trial = free(recomputed(problem, chosen))
        yield tuple(sorted(chosen)), trial
    if len(chosen) < len(order):
        yield tuple(sorted(order)), trial


def _enough(problem: Problem, trial: Trial, left: list[int]) -> set[int]:
    """Take layers left, in their order, so many on each device above its limit as may be enough."""
    schedule, limit = trial.schedule, problem.memory_limit_bytes or 0
    stored, device_of = _stored(schedule)
    bounds = trial.problem.bounds if problem.model else schedule.stages
    stage_of = stage_of_layer(bounds or one_each(problem.layers))
    charged = problem.charged_bytes(trial.timeline.peak_bytes)
    excess = {device: float(size - limit) for device, size in enumerate(charged)}
    added: set[int] = set()
    for number in left:
        stage = stage_of[number]
        device = device_of.get(stage, -1)
        if excess.get(device, 0) > 0:
            # The micro-batch whose dO runs has all of it there.
            excess[device] -= saved_bytes(problem.own_layers, number) * max(stored[stage] - 1, 1)
            added.add(number)
    return added


def _stored(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """The most micro-batches between F and dO of each stage, in its lane's order, and the device of its F."""
    most: dict[int, int] = {}
    device_of: dict[int, int] = {}
    for (device, _), tasks in schedule.lanes.items():
        now: dict[int, int] = {}
        for task in tasks:
            if task.kind in _STORES:
                now[task.stage] = now.get(task.stage, 0) + _STORES[task.kind]
                most[task.stage] = max(most.get(task.stage, 0), now[task.stage])
            if task.kind == "F":
                device_of[task.stage] = device
    return most, device_of


def _fewer(problem: Problem, best: Trial, within: Make) -> Trial:
    """Leave out layers that the limit does not need, those of most seconds first.

    Where the order that there is would be above the limit, another one was never faster.
    """
    costly = sorted(best.problem.recomputed, key=lambda number: -problem.own_layers[number].forward_s)
    again = 0
    for number in costly[:_LEFT_OUT] if len(best.schedule.tasks) <= _TASKS_TO_SEARCH else ():
        trial = _in_same_order(best, number)
        if not trial.keeps_limit:
            continue
        best, chosen = min(best, trial, key=_cost), set(best.problem.recomputed) - {number}
        again += 1
        if again > _PLANNED_AGAIN:
            continue
        try:
            trial = within(recomputed(problem, chosen) if chosen else problem)
        except MemoryLimitError:
            continue
        best = min(best, trial, key=_cost)
    return best


def _in_same_order(trial: Trial, number: int) -> Trial:
    """Return the same schedule in which one layer less runs again."""
    problem = trial.problem
    plain = dataclasses.replace(problem, layers=problem.plain, recomputed=(), plain=())
    left = set(problem.recomputed) - {number}
    return dataclasses.replace(trial, problem=recomputed(plain, left) if left else plain)


# Above this, simulating takes most of the time of planning; simulate() tells what plan() leaves open.
_TASKS_TO_PREDICT = 2_000_000
# Above this, several steps take too long to simulate.
_TASKS_TO_REPEAT = 300_000


def step_s(timeline: Timeline) -> float:
    """Predicted seconds of one step: the period of repeated steps; of an asynchronous one all micro-batches'.

    Above 300,000 tasks the longest time from a device's first task to its last (arXiv 2401.10241, section 3).
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
    """Says how the seconds of a step are told; ``steps`` None: as many are simulated as it takes."""

    step_s: Callable[[Timeline], float] = step_s
    steps: int | None = None

    def steps_of(self, schedule: Schedule) -> int:
        return steps_to_show(schedule) if self.steps is None else self.steps


STEADY = StepTime()


@dataclass(frozen=True)
class Trial:
    """A schedule, without predictions, on paper."""

    schedule: Schedule
    problem: Problem
    step_time: StepTime = STEADY

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated when it is first asked for, and not again."""
        steps = self.step_time.steps_of(self.schedule)
        return simulate(self.schedule, self.problem.layers, self.problem.link, steps)

    @cached_property
    def step_s(self) -> float:
        return self.step_time.step_s(self.timeline)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first step to its end."""
        return float(self.timeline.end_s[0].max(initial=0.0))

    @property
    def peak_bytes(self) -> int:
        return max(self.timeline.peak_bytes, default=0)

    def of(self, steps: int) -> Trial:
        """Return the same with so many steps: this one if it has as many."""
        if self.step_time.steps_of(self.schedule) == steps:
            return self
        return dataclasses.replace(self, step_time=dataclasses.replace(self.step_time, steps=steps))

    @property
    def kept_limit_bytes(self) -> int:
        """The lowest limit that it keeps, as :meth:`Problem.limit_of`."""
        return self.problem.limit_of(self.timeline.peak_bytes)

    @property
    def keeps_limit(self) -> bool:
        """Return whether each device stays within its limit; without one nothing is simulated."""
        return self.problem.memory_limit_bytes is None or self.problem.keeps_limit(self.timeline.peak_bytes)

    def predicted(self) -> Schedule:
        """The schedule with its predictions; without them where nothing is simulated and that takes long."""
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
    """A policy that was tried; where it cannot be taken, ``trial`` is None and ``reason`` says why.

    ``unlimited``: its trial without the memory limit, where that was made, too.
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
    """The chosen schedule on paper, all that was compared, and ``why``, where it is not the fastest."""

    trial: Trial
    candidates: tuple[Candidate, ...] = ()
    why: str = ""

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule with its predictions, which only plans of millions of tasks lack."""
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
    """Return a row of the table.  OptionsError names the ones there are."""
    if not isinstance(name, str) or name not in POLICIES:
        raise OptionsError(f"schedule={name!r:.80} is not accepted; accepted: auto, {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if mode is not None and mode not in policy.modes:
        raise OptionsError(f"schedule={name!r} is one of mode {' or '.join(policy.modes)}, not {mode!r}")
    return policy


def as_asked(policy: Policy, problem: Problem, step_time: StepTime = STEADY, as_run: AsRun = None) -> Plan:
    """Return the plan of one policy; ``as_run`` makes of its schedule what the mode runs.
    OptionsError: an option or problem that it does not take; MemoryLimitError: it is above the limit."""
    return Plan(_within_limit(policy, problem, step_time, as_run))


def tried(
    policy: Policy,
    problem: Problem,
    step_time: StepTime = STEADY,
    as_run: AsRun = None,
    to_beat_s: float = math.inf,
    unlimited: Trial | None = None,
) -> Candidate:
    """Try a policy as :func:`as_asked` does; one that cannot says why, and raises nothing.

    It is searched less, or not at all, where it would hardly be faster than ``to_beat_s``.
    ``unlimited``: its trial without the memory limit, where that was made already.
    """
    try:
        trial = _within_limit(policy, problem, step_time, as_run, to_beat_s, unlimited)
        return Candidate(policy.name, trial.problem, trial, trial.step_s, unlimited=unlimited)
    except MemoryLimitError as error:
        return Candidate(policy.name, problem, reason=f"needs {error.smallest_bytes} bytes", error=error)
    except OOOError as error:
        return Candidate(policy.name, problem, reason=str(error), error=error)


def shortest(candidate: Candidate) -> tuple[float, ...]:
    """Return the key that ``auto`` goes by: the step, of equal ones the one that ends first, then memory."""
    trial = candidate.trial
    if trial is None:
        return float("inf"), float("inf"), 0
    # The rounding of sums must not decide.
    return float(f"{trial.step_s:.9g}"), float(f"{trial.makespan_s:.9g}"), trial.peak_bytes


def choose(candidates: Sequence[Candidate], rank: Rank = shortest, why: str = "") -> Plan:
    """The plan of the lowest rank, the first of equals.  MemoryLimitError, OptionsError: there is none."""
    trial = min(candidates, key=rank).trial
    if trial is None:
        errors = [candidate.error for candidate in candidates]
        over = [error for error in errors if isinstance(error, MemoryLimitError)]
        if over:
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


def _within_limit(
    policy: Policy,
    problem: Problem,
    step_time: StepTime,
    as_run: AsRun,
    to_beat_s: float = math.inf,
    unlimited: Trial | None = None,
) -> Trial:
    """The policy's schedule, or its leanest one; MemoryLimitError where that needs more than the limit."""
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
        return made_for(dataclasses.replace(asked, memory_limit_bytes=None), asked)

    if problem.recompute == NONE:
        return within(problem)
    return search(problem, within, free, to_beat_s, unlimited)
