"""The one clock: it runs tasks on lanes and says when each of them starts.

A lane with a fixed order needs no clock: its next task starts when the lane is free and everything that the
task waits for is there, and both are known once those tasks have begun.  A lane that chooses waits until the
clock is there, because only then does it know what is ready.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints


class LaneKind(enum.IntEnum):
    """Says how a lane takes its next task: in the order listed, of what is ready the first listed, or the one
    that was ready first."""

    ORDERED = 0
    PRIORITY = 1
    FIFO = 2


class Tasks:
    """Tasks by number, with their seconds, and the tasks that wait for each.

    ``after[i]`` are pairs of a task that waits for task i, and the seconds that it waits longer on another
    lane.
    """

    def __init__(self, seconds: Floats, source: Ints, target: Ints, lag_s: Floats) -> None:
        count, order = len(seconds), np.argsort(source, kind="stable")
        self.seconds: list[float] = seconds.tolist()
        pairs = list(zip(target[order].tolist(), lag_s[order].tolist(), strict=True))
        first = np.searchsorted(source[order], np.arange(count + 1)).tolist()
        self.after = [pairs[a:b] if a < b else () for a, b in zip(first, first[1:], strict=False)]
        self.waits: list[int] = np.bincount(target, minlength=count).tolist()


class Choose(Protocol):
    """Decides for all lanes of a run what each begins next."""

    def known(self, task: int, ready_s: float) -> None:
        """Everything that a task waits for has begun: the task can start from ``ready_s`` on."""

    def take(self, lane: int, now: float) -> int:
        """Return the task that a free lane begins now, -1 for none; it is asked again when one is ready."""


class Sharing:
    """Tasks that run side by side on one device share it: all slow down alike while it is full.

    Each task has its device, -1 for one that takes no part, and the share of the device that it needs.
    """

    def __init__(self, device: Sequence[int], occupancy: Sequence[float]) -> None:
        self.device, self.occupancy = device, occupancy
        self.left_s: dict[int, dict[int, float]] = {}
        self.rate: dict[int, float] = {}
        self.since_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}

    def begin(self, task: int, seconds: float, now: float) -> bool:
        """Take a task over; False where it takes no part."""
        device = self.device[task]
        if device < 0 or not seconds:
            return False
        self._move(device, now)
        self.left_s.setdefault(device, {})[task] = seconds
        self._expect(device, now)
        return True

    def next_end_s(self) -> float:
        return min(self.end_s.values(), default=float("inf"))

    def ended(self, now: float) -> list[int]:
        """Let go of the tasks that are done by now, and return them."""
        tasks = [task for task, end_s in self.end_s.items() if end_s <= now]
        for task in tasks:
            device = self.device[task]
            self._move(device, now)
            del self.left_s[device][task], self.end_s[task]
            self._expect(device, now)
        return tasks

    def _move(self, device: int, now: float) -> None:
        passed_s = (now - self.since_s.get(device, now)) * self.rate.get(device, 1.0)
        for task in self.left_s.get(device, {}):
            self.left_s[device][task] -= passed_s
        self.since_s[device] = now

    def _expect(self, device: int, now: float) -> None:
        needed = sum(self.occupancy[task] for task in self.left_s[device])
        self.rate[device] = rate = 1.0 if needed <= 1 else 1 / needed
        for task, left_s in self.left_s[device].items():
            self.end_s[task] = now + max(left_s, 0.0) / rate


@dataclass(frozen=True)
class Times:
    """Start and end of each task in seconds, NaN where it can never start, and the order of those begun.

    ``begun`` leaves out the tasks of lanes with a fixed order.
    """

    start_s: list[float]
    end_s: list[float]
    begun: list[int]

    @cached_property
    def makespan_s(self) -> float:
        return max(self.end_s, default=0.0)


def run(
    tasks: Tasks,
    lanes: Sequence[Sequence[int]],
    kinds: Sequence[int] = (),
    choose: Choose | None = None,
    sharing: Sharing | None = None,
) -> Times:
    """Run each lane's tasks one at a time, to their ends.

    Args:
        tasks: numbered from 0; each is on one lane.
        lanes: the tasks of each lane; their order counts as ``kinds`` says.
        kinds: a :class:`LaneKind` for each lane; (): all have a fixed order.
        choose: what decides instead where no lane has a fixed order.
        sharing: what slows tasks down; then no lane has a fixed order.
    """
    clock = _Clock(tasks, lanes, kinds, choose, sharing)
    clock.run()
    return Times(clock.start_s, clock.end_s, clock.begun)


class _Clock:
    def __init__(
        self,
        tasks: Tasks,
        lanes: Sequence[Sequence[int]],
        kinds: Sequence[int],
        choose: Choose | None,
        sharing: Sharing | None,
    ) -> None:
        count = len(tasks.seconds)
        self.tasks, self.choose, self.sharing = tasks, choose, sharing
        kinds = kinds or [LaneKind.ORDERED] * len(lanes)
        self.runs_ahead = [kind == LaneKind.ORDERED for kind in kinds]
        self.by_time = [kind == LaneKind.FIFO for kind in kinds]
        self.lane_of, self.rank = [0] * count, [0] * count
        self.waits, self.ready_s = tasks.waits.copy(), [0.0] * count
        self.start_s, self.end_s = [float("nan")] * count, [float("nan")] * count
        self.begun: list[int] = []
        # Tasks that have ended, or begun where the end is known, and are not handed on yet.
        self.ended: list[int] = []
        # An ordered lane has the place of its next task, a time from which it is free, a task it waits for.
        self.place, self.free_s, self.blocked = [0] * len(lanes), [0.0] * len(lanes), [-1] * len(lanes)
        self.woken: list[int] = []
        # Lanes that choose: their tasks by rank, ranks of what is ready, lanes with something new.
        self.by_rank: list[Any] = [
            [] if by_time else lane for lane, by_time in zip(lanes, self.by_time, strict=True)
        ]
        self.ready: list[list[int]] = [[] for _ in lanes]
        self.idle = [True] * len(lanes)
        self.touched: list[int] = []
        # (time, task) when a task is ready, (time, -1 - task) when it ends.
        self.events: list[tuple[float, int]] = []
        self._enter(lanes)

    def _enter(self, lanes: Sequence[Sequence[int]]) -> None:
        for number, lane in enumerate(lanes):
            for task in lane:
                self.lane_of[task] = number
            if self.runs_ahead[number]:
                self.woken.append(number)
                continue
            for place, task in enumerate(lane):
                self.rank[task] = place
                if not self.waits[task]:
                    self.events.append((0.0, task))
                    if self.choose is not None:
                        self.choose.known(task, 0.0)
        self.events.sort()

    def run(self) -> None:
        """Run everything; it is one function with local names because each line runs millions of times."""
        lane_of, waits, ready_s = self.lane_of, self.waits, self.ready_s
        start_s, end_s, seconds, after = self.start_s, self.end_s, self.tasks.seconds, self.tasks.after
        ended, woken, touched, events, idle = self.ended, self.woken, self.touched, self.events, self.idle
        runs_ahead, by_rank, rank, ready = self.runs_ahead, self.by_rank, self.rank, self.ready
        choose, sharing, now = self.choose, self.sharing, 0.0
        directly = [choose is None and not by_time for by_time in self.by_time]
        while True:
            while ended or woken:
                if not ended:
                    self._advance(woken.pop())
                    continue
                task = ended.pop()
                here, done_s = lane_of[task], end_s[task]
                for then, lag_s in after[task]:
                    there = lane_of[then]
                    there_s = done_s if there == here else done_s + lag_s
                    if there_s > ready_s[then]:
                        ready_s[then] = there_s
                    waits[then] -= 1
                    if waits[then]:
                        continue
                    if runs_ahead[there]:
                        if self.blocked[there] == then:
                            woken.append(there)
                    elif ready_s[then] <= now and directly[there]:
                        heappush(ready[there], rank[then])
                        touched.append(there)
                    else:
                        heappush(events, (ready_s[then], then))
                        if choose is not None:
                            choose.known(then, ready_s[then])
            if choose is not None and touched:
                self._ask(choose, now)
                continue
            for lane in touched:
                if idle[lane] and ready[lane]:
                    task = by_rank[lane][heappop(ready[lane])]
                    idle[lane] = False
                    start_s[task] = now
                    self.begun.append(task)
                    if sharing is None or not sharing.begin(task, seconds[task], now):
                        end_s[task] = now + seconds[task]
                        heappush(events, (end_s[task], -1 - task))
            del touched[:]
            if sharing is not None:
                self._end_shared(sharing)
            if not events:
                return
            now = events[0][0]
            # Everything that happens now comes before a lane chooses.
            while events and events[0][0] <= now:
                what = heappop(events)[1]
                if what >= 0:
                    lane = lane_of[what]
                    if self.by_time[lane]:
                        rank[what] = len(by_rank[lane])
                        by_rank[lane].append(what)
                    heappush(ready[lane], rank[what])
                else:
                    lane = lane_of[-1 - what]
                    idle[lane] = True
                    if choose is None:
                        ended.append(-1 - what)
                touched.append(lane)

    def _advance(self, lane: int) -> None:
        """Run a lane with a fixed order as far as what it waits for has begun."""
        order, place, now = self.by_rank[lane], self.place[lane], self.free_s[lane]
        waits, ready_s, seconds, after = self.waits, self.ready_s, self.tasks.seconds, self.tasks.after
        self.blocked[lane] = -1
        while place < len(order):
            task = order[place]
            if waits[task]:
                self.blocked[lane] = task
                break
            if ready_s[task] > now:
                now = ready_s[task]
            self.start_s[task] = now
            self.end_s[task] = now = now + seconds[task]
            if after[task]:
                self.ended.append(task)
            place += 1
        self.place[lane], self.free_s[lane] = place, now

    def _ask(self, choose: Choose, now: float) -> None:
        """Ask what the first free lane begins; the others know then what will be ready."""
        self.touched.sort(reverse=True)
        while self.touched and not self.ended:
            lane = self.touched.pop()
            task = choose.take(lane, now) if self.idle[lane] else -1
            if task >= 0:
                self.idle[lane] = False
                self.start_s[task], self.end_s[task] = now, now + self.tasks.seconds[task]
                heappush(self.events, (self.end_s[task], -1 - task))
                self.begun.append(task)
                self.ended.append(task)

    def _end_shared(self, sharing: Sharing) -> None:
        """End the shared tasks that are done before anything else happens."""
        now = sharing.next_end_s()
        if not self.events or now <= self.events[0][0]:
            for task in sharing.ended(now):
                self.end_s[task] = now
                heappush(self.events, (now, -1 - task))
