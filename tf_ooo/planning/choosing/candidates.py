"""Schedules of policies by name, tried by simulation, and the best of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tf_ooo.errors import MemoryLimitError, OOOError, OptionsError
from tf_ooo.planning.building.choice import span_s
from tf_ooo.planning.model.problem import Policy, Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.policies import POLICIES
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

# Above this, simulating takes most of the time of planning; simulate() tells what plan() leaves open.
_TASKS_TO_PREDICT = 2_000_000
# Above this, several steps take too long to simulate.
_TASKS_TO_REPEAT = 300_000
_STEADY_STEPS = 4


@dataclass(frozen=True)
class Candidate:
    """One schedule that ``auto`` has looked at.

    ``reason`` says why it cannot be taken, empty where it can; then there is a timeline.
    ``needs_bytes`` is the smallest memory limit that it can keep, where the one given is too small.
    """

    name: str
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    reason: str = ""
    needs_bytes: int | None = None

    @cached_property
    def step_s(self) -> float:
        """Predicted seconds of one step; infinite where there is none."""
        return float("inf") if self.timeline is None else step_s(self.timeline)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first step to its end; infinite where there is none."""
        return float("inf") if self.timeline is None else float(self.timeline.end_s[0].max(initial=0.0))


def policy_named(name: str, mode: str | None = None) -> Policy:
    """A row of the table.  OptionsError names the ones there are."""
    if name not in POLICIES:
        raise OptionsError(f"schedule={name!r} is not accepted; accepted: auto, {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if mode is not None and mode not in policy.modes:
        raise OptionsError(f"schedule={name!r} is one of mode {' or '.join(policy.modes)}, not {mode!r}")
    return policy


def make(policy: Policy, problem: Problem) -> Schedule:
    """The policy's schedule, within the memory limit; MemoryLimitError where it has none."""
    for name in problem.options:
        if name not in policy.options:
            known = f"its options are {', '.join(policy.options)}" if policy.options else "it has no options"
            raise OptionsError(
                f"schedule {policy.name!r}: {name}={problem.options[name]!r} is unknown; {known}"
            )
    schedule = policy.make(problem)
    limit = problem.memory_limit_bytes
    if limit is None or _peak(schedule, problem) <= limit:
        return schedule
    lean = policy.make(dataclasses.replace(problem, memory_limit_bytes=0))
    smallest = _peak(lean, problem)
    if smallest > limit:
        raise MemoryLimitError(limit, smallest)
    return lean


def candidates(
    problem: Problem, mode: str | None = None, on_progress: Callable[[str], None] | None = None
) -> list[Candidate]:
    """Every schedule that is legal for the mode, simulated; the fastest first.

    Of equally fast ones the one that ends first, then the one that needs least memory.  Policies that
    would take long for so many tasks are left out, with that for a reason, if another is possible.

    Args:
        problem: what to schedule; options of policies are left to the policies' own search.
        mode: None: pipeline if there are several devices, else single_device.
        on_progress: is told the name of each policy before it is tried.
    """
    wanted = mode or ("pipeline" if problem.devices > 1 else "single_device")
    by_name = [policy for policy in _of_mode(wanted) if policy.by_name]
    rows = [policy for policy in _of_mode(wanted) if not policy.by_name]
    tasks = 3 * problem.devices * problem.microbatches
    slow = [policy for policy in rows if policy.auto_tasks is not None and tasks > policy.auto_tasks]

    def tried(policies: Sequence[Policy]) -> list[Candidate]:
        found = []
        for policy in policies:
            if on_progress is not None:
                on_progress(policy.name)
            chosen = {name: value for name, value in problem.options.items() if name in policy.options}
            found.append(_candidate(policy, dataclasses.replace(problem, options=chosen, mode=wanted)))
        return found

    found = tried([policy for policy in rows if policy not in slow])
    if any(candidate.schedule is not None for candidate in found):
        why = f"not tried: takes long for {tasks:,} tasks; ask for it by name"
        found += [Candidate(policy.name, reason=why) for policy in slow]
    else:
        found += tried(slow)
    found += [Candidate(policy.name, reason=policy.by_name) for policy in by_name]
    return sorted(found, key=_rank)


def _rank(candidate: Candidate) -> tuple[float, float, int]:
    peaks = () if candidate.timeline is None else candidate.timeline.peak_bytes
    # The rounding of sums must not decide.
    step_s, makespan_s = (float(f"{value:.9g}") for value in (candidate.step_s, candidate.makespan_s))
    return step_s, makespan_s, max(peaks, default=0)


def _of_mode(mode: str) -> Iterator[Policy]:
    rows = [policy for policy in POLICIES.values() if mode in policy.modes]
    if not rows:
        modes = sorted({mode for policy in POLICIES.values() for mode in policy.modes})
        raise OptionsError(f"mode={mode!r} is not accepted; accepted: {', '.join(modes)}")
    yield from rows


def _candidate(policy: Policy, problem: Problem) -> Candidate:
    try:
        schedule = make(policy, problem)
        timeline = simulated(schedule, problem)
    except MemoryLimitError as error:
        needs = error.smallest_bytes
        return Candidate(policy.name, reason=f"needs {needs} bytes", needs_bytes=needs)
    except OOOError as error:
        return Candidate(policy.name, reason=str(error))
    return Candidate(policy.name, schedule, timeline)


def best(found: Sequence[Candidate], problem: Problem) -> Schedule:
    """The fastest candidate's schedule with its predictions; MemoryLimitError where there is none."""
    first = min(found, key=_rank)
    if first.schedule is None or first.timeline is None:
        raise _none_left(found, problem)
    return _with_prediction(first.schedule, first.timeline)


def _none_left(found: Sequence[Candidate], problem: Problem) -> OOOError:
    peaks = [candidate.needs_bytes for candidate in found if candidate.needs_bytes is not None]
    if problem.memory_limit_bytes is not None and peaks:
        return MemoryLimitError(problem.memory_limit_bytes, min(peaks))
    return OptionsError(f"no schedule is possible: {'; '.join(f'{c.name}: {c.reason}' for c in found)}")


def step_s(timeline: Timeline) -> float:
    """Predicted seconds of one step: the period of repeated steps.

    A device begins its next step when its own part of this one is done, unless the schedule has a
    barrier.  In an asynchronous schedule each micro-batch is a step, and this is the time of all of
    them.  Above 300,000 tasks of one step it is the longest time that a device takes from its first
    task to its last (arXiv 2401.10241, section 3), which the period does not exceed.
    """
    schedule = timeline.schedule
    if schedule.asynchronous:
        return timeline.steady_step_s * schedule.microbatches
    if timeline.steps > 1 or timeline.start_s.size <= _TASKS_TO_REPEAT:
        return timeline.steady_step_s
    one_lane_each = len(schedule.lanes) == schedule.devices and not schedule.barrier
    return span_s(timeline) if one_lane_each else timeline.makespan_s


def simulated(schedule: Schedule, problem: Problem) -> Timeline:
    """One step; where steps overlap as many as show the steady state, in time and in memory."""
    overlap = schedule.mode in ("single_device", "data_parallel") and len(schedule.lanes) > 1
    steps = _STEADY_STEPS + schedule.steps_ahead if overlap else 1
    return simulate(schedule, problem.layers, problem.link, steps)


def _peak(schedule: Schedule, problem: Problem) -> int:
    return max(simulated(schedule, problem).peak_bytes, default=0)


def predicted(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with its predictions; without them above two million tasks."""
    if len(schedule.tasks) > _TASKS_TO_PREDICT:
        return schedule
    return _with_prediction(schedule, simulated(schedule, problem))


def _with_prediction(schedule: Schedule, timeline: Timeline) -> Schedule:
    peak = max(timeline.peak_bytes, default=0)
    return dataclasses.replace(schedule, predicted_step_s=step_s(timeline), predicted_peak_bytes=peak)
