"""A schedule and the costs that it was made for, simulated once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tf_ooo.planning.building.choice import span_s, steps_to_show
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.planning.simulation.simulator import simulate
from tf_ooo.planning.simulation.timeline import Timeline

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
class Clock:
    """How the seconds of a step are told; ``steps`` None: so many are simulated as show the steady state."""

    step_s: Callable[[Timeline], float] = step_s
    steps: int | None = None

    def steps_of(self, schedule: Schedule) -> int:
        return steps_to_show(schedule) if self.steps is None else self.steps


STEADY = Clock()


@dataclass(frozen=True)
class Trial:
    """A schedule, without predictions, on paper."""

    schedule: Schedule
    problem: Problem
    clock: Clock = STEADY

    @cached_property
    def timeline(self) -> Timeline:
        """Simulated when it is first asked for, and not again."""
        steps = self.clock.steps_of(self.schedule)
        return simulate(self.schedule, self.problem.layers, self.problem.link, steps)

    @cached_property
    def step_s(self) -> float:
        return self.clock.step_s(self.timeline)

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first step to its end."""
        return float(self.timeline.end_s[0].max(initial=0.0))

    @property
    def peak_bytes(self) -> int:
        return max(self.timeline.peak_bytes, default=0)

    def of(self, steps: int) -> Trial:
        """The same with so many steps: this one if it has as many."""
        if self.clock.steps_of(self.schedule) == steps:
            return self
        return dataclasses.replace(self, clock=dataclasses.replace(self.clock, steps=steps))

    def predicted(self) -> Schedule:
        """The schedule with its predictions; without them where nothing is simulated and that takes long."""
        if "timeline" not in vars(self) and len(self.schedule.tasks) > _TASKS_TO_PREDICT:
            return self.schedule
        return dataclasses.replace(
            self.schedule, predicted_step_s=self.step_s, predicted_peak_bytes=self.peak_bytes
        )
