"""Takes the waiting out of a given order: tasks move forward into gaps while memory allows.

Orders of V-shaped schedules are for tasks of one tick.  Run on paper with real costs, a device that would
wait takes a later task that is ready (arXiv 2405.15362, section 3.4, "squeezing" and "reordering").  It ends:
a task moves forward only if the order left stores at most ``limit`` activations everywhere; the first task
left of the given order heads its device's list, and what it needs is done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.planning.building.pipeline import StagedLayers
from tf_ooo.planning.building.step_tasks import KINDS, StepTasks
from tf_ooo.planning.model.schedule import Schedule, Task

_STORES = {"F": 1, "dO": 0, "dW": -1}
_CLASSES = 5


@dataclass(frozen=True)
class Style:
    """Says how a device chooses.

    ``yielding``: a dW lets a ready F or dO pass.  ``fill``: what a gap is filled with first, dW or F (with
    dO). ``patience``: only with what ends, times this, before the next F or dO is known to be ready.
    """

    yielding: bool = True
    fill: str = "dW"
    patience: float = 1.0


@dataclass(frozen=True)
class _Choice:
    place: int
    task: int
    is_weight_grad: bool
    allowed: bool


def squeezed(
    policy: str, stages: StagedLayers, lanes: Sequence[Sequence[Task]], limit: int, style: Style
) -> Schedule:
    """The schedule with a new order of each device's tasks.

    ``limit``: most activations on a device, where a stage's count one.
    """
    tasks, place = StepTasks(stages), stages.devices.tolist()
    times = tasks.run(place, tasks.urgent, choose=_Squeezing(tasks, lanes, limit, style))
    return stages.with_updates(policy, tasks.orders(place, times), back=True)


class _Squeezing:
    def __init__(self, tasks: StepTasks, lanes: Sequence[Sequence[Task]], limit: int, style: Style) -> None:
        self.tasks, self.limit, self.style = tasks, limit, style
        self.seconds = tasks.tasks.seconds
        number = {kind: tasks.numbers[place].tolist() for place, kind in enumerate(KINDS)}
        self.left: list[list[int]] = [
            [number[task.kind][task.stage][task.microbatch] for task in lane] for lane in lanes
        ]
        self.stored = [0] * len(lanes)
        self.ready_s = [math.inf] * len(tasks.stage)

    def known(self, task: int, ready_s: float) -> None:
        self.ready_s[task] = ready_s

    def take(self, lane: int, now: float) -> int:
        place = self._place(lane, now) if self.left[lane] else None
        if place is None:
            return -1
        task = self.left[lane].pop(place)
        self.stored[lane] += _STORES[self.tasks.kind_of(task)]
        return task

    def _place(self, lane: int, now: float) -> int | None:
        """Return the place of the task that runs now; None: none does."""
        head = self.left[lane][0]
        if self.tasks.kind_of(head) != "dW" and self.ready_s[head] <= now:
            return 0
        choice = self._choose(self._choices(lane), now)
        return None if choice is None else choice.place

    def _choices(self, lane: int) -> list[_Choice]:
        """Return the first task left of each stage's F and dO, and the first dW."""
        choices: dict[tuple[str, int], _Choice] = {}
        stored = highest = self.stored[lane]
        for place, task in enumerate(self.left[lane]):
            kind = self.tasks.kind_of(task)
            key = (kind, -1 if kind == "dW" else self.tasks.stage[task])
            adds = _STORES[kind]
            if key not in choices:
                choices[key] = _Choice(place, task, kind == "dW", adds <= 0 or highest + adds <= self.limit)
                if len(choices) == _CLASSES:
                    break
            stored += adds
            highest = max(highest, stored)
        return list(choices.values())

    def _choose(self, choices: list[_Choice], now: float) -> _Choice | None:
        ready = [c for c in choices if c.allowed and self.ready_s[c.task] <= now]
        chain = [c for c in choices if not c.is_weight_grad]
        head = choices[0]
        yields = self.style.yielding and head.is_weight_grad
        if head in ready and not yields:
            return head
        if chain and chain[0] in ready and (self.style.yielding or chain[0] is head):
            return chain[0]
        later_s = (self.ready_s[c.task] for c in chain)
        soon_s = min((ready_s for ready_s in later_s if ready_s > now), default=math.inf)
        ends_s = {c.place: now + self.style.patience * self.seconds[c.task] for c in ready}
        fitting = [c for c in ready if c is head or ends_s[c.place] <= soon_s * (1 + 1e-12)]
        wanted = [c for c in fitting if c.is_weight_grad == (self.style.fill == "dW")]
        return next(iter(wanted or fitting), None)
