"""Takes the waiting out of a given order: tasks move forward into gaps while memory allows.

Orders of V-shaped schedules are for tasks of one tick.  Run on paper with real costs, a device that would
wait takes a later task that is ready (arXiv 2405.15362, section 3.4, "squeezing" and "reordering").  It ends:
a task moves forward only if the order left stores at most ``limit`` activations everywhere; the first task
left of the given order heads its device's list, and what it needs is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.planning.model.schedule import Task

_STORES = {"F": 1, "dO": 0, "dW": -1}
_NEVER = float("inf")
_CLASSES = 5


@dataclass(frozen=True)
class StageTimes:
    """Each stage's device, seconds of its tasks, and of a message to the next stage on another device."""

    device: Sequence[int]
    seconds: dict[str, Sequence[float]]
    hop_s: Sequence[float]


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
    task: Task
    ready_s: float | None
    allowed: bool


def squeeze(lanes: Sequence[Sequence[Task]], times: StageTimes, limit: int, style: Style) -> list[list[Task]]:
    """A new order of each device's tasks; ``limit``: most activations there, a stage's counting one."""
    run = _Squeezing(lanes, times, limit, style)
    run.run()
    return run.order


class _Squeezing:
    def __init__(self, lanes: Sequence[Sequence[Task]], times: StageTimes, limit: int, style: Style) -> None:
        self.left = [list(lane) for lane in lanes]
        self.times, self.limit, self.style = times, limit, style
        self.order: list[list[Task]] = [[] for _ in lanes]
        self.stored = [0] * len(lanes)
        self.free_s = [0.0] * len(lanes)
        count = 1 + max((task.microbatch for lane in lanes for task in lane), default=-1)
        # By kind, stage and micro-batch; None until the task has begun.
        self.end_s: dict[str, list[list[float | None]]] = {
            kind: [[None] * count for _ in times.device] for kind in _STORES
        }
        self.wake = [(0.0, device) for device in range(len(lanes))]

    def run(self) -> None:
        waiting: set[int] = set()
        while self.wake:
            now = self.wake[0][0]
            while self.wake and self.wake[0][0] <= now:
                waiting.add(heapq.heappop(self.wake)[1])
            for device in sorted(waiting):
                waiting.discard(device)
                if self.left[device] and self.free_s[device] <= now:
                    self._step(device, now)

    def _step(self, device: int, now: float) -> None:
        place = self._place(device, now)
        if place is None:
            return
        task = self.left[device].pop(place)
        end_s = now + self.times.seconds[task.kind][task.stage]
        self.free_s[device] = self.end_s[task.kind][task.stage][task.microbatch] = end_s
        self.stored[device] += _STORES[task.kind]
        self.order[device].append(task)
        heapq.heappush(self.wake, (end_s, device))
        self._wake_readers(task, device, end_s)

    def _place(self, device: int, now: float) -> int | None:
        """Choose the task left that runs now; None: none does, and the device is woken when one may."""
        head = self.left[device][0]
        if head.kind != "dW":
            ready_s = self._ready_s(head)
            if ready_s is not None and ready_s <= now:
                return 0
        choices = self._choices(device)
        chosen = self._choose(choices, now)
        if chosen is not None:
            return chosen.place
        later = [c.ready_s for c in choices if c.ready_s is not None and c.ready_s > now]
        if later:
            heapq.heappush(self.wake, (min(later), device))
        return None

    def _wake_readers(self, task: Task, device: int, end_s: float) -> None:
        step = {"F": 1, "dO": -1, "dW": 0}[task.kind]
        reader = task.stage + step
        if step and 0 <= reader < len(self.times.device) and self.times.device[reader] != device:
            hop_s = self.times.hop_s[min(task.stage, reader)]
            heapq.heappush(self.wake, (end_s + hop_s, self.times.device[reader]))

    def _choices(self, device: int) -> list[_Choice]:
        """Return the first task left of each stage's F and dO, and the first dW."""
        choices: dict[tuple[str, int], _Choice] = {}
        stored = highest = self.stored[device]
        for place, task in enumerate(self.left[device]):
            key = ("dW", -1) if task.kind == "dW" else (task.kind, task.stage)
            adds = _STORES[task.kind]
            if key not in choices:
                allowed = adds <= 0 or highest + adds <= self.limit
                choices[key] = _Choice(place, task, self._ready_s(task), allowed)
                if len(choices) == _CLASSES:
                    break
            stored += adds
            highest = max(highest, stored)
        return list(choices.values())

    def _ready_s(self, task: Task) -> float | None:
        """Return when all that a task needs is there; None while that is not known."""
        kind, stage, batch = task.kind, task.stage, task.microbatch
        if kind == "dW":
            return self.end_s["dO"][stage][batch]
        other = stage - 1 if kind == "F" else stage + 1
        ready_s = 0.0
        if 0 <= other < len(self.times.device):
            there_s = self.end_s[kind][other][batch]
            if there_s is None:
                return None
            device = self.times.device
            crosses = device[other] != device[stage]
            ready_s = there_s + (self.times.hop_s[min(other, stage)] if crosses else 0.0)
        own_s = ready_s if kind == "F" else self.end_s["F"][stage][batch]
        return None if own_s is None else max(ready_s, own_s)

    def _choose(self, choices: list[_Choice], now: float) -> _Choice | None:
        ready = [c for c in choices if c.allowed and c.ready_s is not None and c.ready_s <= now]
        chain = [c for c in choices if c.task.kind != "dW"]
        head = choices[0]
        yields = self.style.yielding and head.task.kind == "dW"
        if head in ready and not yields:
            return head
        if chain and chain[0] in ready and (self.style.yielding or chain[0] is head):
            return chain[0]
        soon_s = min((c.ready_s for c in chain if c.ready_s is not None and c.ready_s > now), default=_NEVER)
        seconds, patience = self.times.seconds, self.style.patience
        ends_s = {c.place: now + patience * seconds[c.task.kind][c.task.stage] for c in ready}
        fitting = [c for c in ready if c is head or ends_s[c.place] <= soon_s * (1 + 1e-12)]
        wanted = [c for c in fitting if (c.task.kind == "dW") == (self.style.fill == "dW")]
        return next(iter(wanted or fitting), None)
