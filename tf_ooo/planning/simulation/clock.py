"""Defines the one clock: it runs tasks on lanes and says when each of them starts.

A lane with a fixed order needs no clock: it looks up the ends of tasks that its next task waits for, and runs
on until one is not known.  A lane that chooses waits for the clock to advance, because only then does it know
which tasks are ready.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np

from tf_ooo.planning.model.task import Floats, Ints

Lanes = Sequence[Sequence[int]]
_MANY = 1_000_000


class LaneKind(enum.IntEnum):
    """Says how a lane takes its next task: as listed, the first listed that is ready, or the first ready."""

    ORDERED = 0
    PRIORITY = 1
    FIFO = 2


def _column(values: Ints | Floats) -> Sequence[Any]:
    """Return numbers to read one by one: a list is faster, but takes 32 bytes for each."""
    return values.tolist() if len(values) < _MANY else values.data


class Tasks:
    """Holds tasks by number, with their seconds, and which of them wait for which.

    Each target waits for its source, and ``lag_s`` longer where that is on another lane; within a lane with a
    fixed order no edge has a lag.
    """

    def __init__(self, seconds: Floats, source: Ints, target: Ints, lag_s: Floats) -> None:
        self.seconds: Sequence[float] = _column(seconds)
        self._edges = source, target, lag_s

    @cached_property
    def after(self) -> list[Sequence[tuple[int, float]]]:
        """Return for each task the tasks that wait for it, with their lags."""
        source, target, lag_s = self._edges
        order = np.argsort(source, kind="stable")
        pairs = list(zip(target[order].tolist(), lag_s[order].tolist(), strict=True))
        first = np.searchsorted(source[order], np.arange(len(self.seconds) + 1)).tolist()
        return [pairs[a:b] if a < b else () for a, b in zip(first, first[1:], strict=False)]

    @cached_property
    def waits(self) -> list[int]:
        """Return how many tasks each waits for."""
        return np.bincount(self._edges[1], minlength=len(self.seconds)).tolist()  # type: ignore[no-any-return]

    @cached_property
    def before(self) -> tuple[Sequence[int], list[float], list[int]]:
        """Return the edges into each task: sources, lags, and the next edge into the same task or -1.

        The first edge into task i has number i; for a task that waits for nothing its source is -1.
        """
        source, target, lag_s = self._edges
        count, numbers = len(self.seconds), np.arange(len(target))
        first = np.full(count, -1)
        first[target] = numbers
        further = np.flatnonzero(first[target] != numbers)
        further = further[np.argsort(target[further], kind="stable")]
        edges, into = np.concatenate([first, further]), target[further]
        following, these = np.full(len(edges), -1), np.arange(count, len(edges))
        # A further edge comes after the further one before it, or after the task's first edge.
        following[np.where(np.diff(into, prepend=-1) != 0, into, these - 1)] = these
        sources = _column(np.append(source.astype(np.int32), np.int32(-1))[edges])
        lags = np.append(lag_s, 0.0)[edges].tolist() if lag_s.any() else [0.0] * len(edges)
        return sources, lags, following.tolist()


class Choose(Protocol):
    """Decides for all lanes of a run what each begins next."""

    def known(self, task: int, ready_s: float) -> None:
        """Take note that a task can start from ``ready_s`` on, as all that it waits for has begun."""

    def take(self, lane: int, now: float) -> int:
        """Return the task that a free lane begins now, or -1; the lane asks again when a task is ready."""


class Sharing:
    """Slows down tasks that run side by side on one device, all alike, while the device is full.

    Each task has a device, -1 if it takes no part, and needs a share of that device.
    """

    def __init__(self, device: Sequence[int], occupancy: Sequence[float]) -> None:
        self.device, self.occupancy = device, occupancy
        self.left_s: dict[int, dict[int, float]] = {}
        self.rate: dict[int, float] = {}
        self.since_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}

    def begin(self, task: int, seconds: float, now: float) -> bool:
        """Start a task on its device; return False if it takes no part."""
        device = self.device[task]
        if device < 0 or not seconds:
            return False
        self._move(device, now)
        self.left_s.setdefault(device, {})[task] = seconds
        self._expect(device, now)
        return True

    def ended(self, now: float) -> list[int]:
        """Remove the tasks that are done by now, and return them."""
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
    """Holds start and end of each task in seconds, NaN if it can never start, and the order of those begun.

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
    lanes: Lanes,
    kinds: Sequence[int] = (),
    choose: Choose | None = None,
    sharing: Sharing | None = None,
) -> Times:
    """Run each lane's tasks one at a time, to their ends.

    Args:
        tasks: numbered from 0; each is on one lane.
        lanes: the tasks of each lane; their order counts as ``kinds`` says.
        kinds: a :class:`LaneKind` for each lane; (): all have a fixed order.
        choose: decides instead of ``kinds``; then no lane has a fixed order.
        sharing: slows tasks down; then no lane has a fixed order.
    """
    clock = _Clock(tasks, lanes, kinds, choose, sharing)
    clock.run()
    return Times(clock.start_s, clock.end_s[:-1], clock.begun)


class _Clock:
    def __init__(
        self, tasks: Tasks, lanes: Lanes, kinds: Sequence[int], choose: Choose | None, sharing: Sharing | None
    ) -> None:
        self.tasks, self.choose, self.sharing = tasks, choose, sharing
        self.start_s = [float("nan")] * len(tasks.seconds)
        # An edge from -1 finds the last one, which is always there.
        self.end_s = [*self.start_s, 0.0]
        self.begun: list[int] = []
        # Tasks that have ended, or begun where the end is known, and are not handed on yet.
        self.ended: list[int] = []
        # Lanes with a fixed order that may run on, and those that wait for a task.
        self.woken: list[Iterator[int]] = []
        self.waiting: dict[int, list[Iterator[int]]] = {}
        # Lanes that choose: their tasks by rank, ranks of what is ready, lanes with something new.
        kinds = kinds or [LaneKind.ORDERED] * len(lanes)
        self.chooses = any(kind != LaneKind.ORDERED for kind in kinds)
        self.by_time = [kind == LaneKind.FIFO for kind in kinds]
        by_rank = zip(lanes, self.by_time, strict=True)
        self.by_rank: list[Any] = [[] if by_time else lane for lane, by_time in by_rank]
        self.ready: list[list[int]] = [[] for _ in lanes]
        self.idle = [True] * len(lanes)
        self.touched: list[int] = []
        self.waits = tasks.waits.copy() if self.chooses else []
        self.lane_of, self.rank = [-1] * len(self.waits), [0] * len(self.waits)
        self.ready_s = [0.0] * len(self.waits)
        # (time, task) when a task is ready, (time, -1 - task) when it ends.
        self.events: list[tuple[float, int]] = []
        for number, (lane, kind) in enumerate(zip(lanes, kinds, strict=True)):
            if kind != LaneKind.ORDERED:
                self._enter(number, lane)
                continue
            self.woken.append(self._in_order(lane))
            for task in lane if self.chooses else ():
                self.waits[task] = 0  # it is never told
        self.events.sort()

    def _enter(self, number: int, lane: Sequence[int]) -> None:
        lane_of, rank, waits = self.lane_of, self.rank, self.waits
        for place, task in enumerate(lane):
            lane_of[task], rank[task] = number, place
            if not waits[task]:
                self.events.append((0.0, task))
                if self.choose is not None:
                    self.choose.known(task, 0.0)

    def run(self) -> None:
        """Run everything, in one function with local names because each line runs millions of times."""
        lane_of, waits, ready_s, rank, ready = self.lane_of, self.waits, self.ready_s, self.rank, self.ready
        after, seconds = self.tasks.after if self.chooses else [], self.tasks.seconds
        start_s, end_s, begun, ended = self.start_s, self.end_s, self.begun, self.ended
        events, touched, woken, waiting = self.events, self.touched, self.woken, self.waiting
        idle, by_rank, choose, sharing, now = self.idle, self.by_rank, self.choose, self.sharing, 0.0
        directly = [choose is None and not by_time for by_time in self.by_time]
        while True:
            if woken:
                self._run_ahead()
            for task in ended:
                here, done_s = lane_of[task], end_s[task]
                is_ahead = done_s > now
                for then, lag_s in after[task]:
                    if lag_s or is_ahead:
                        there_s = done_s if lane_of[then] == here else done_s + lag_s
                        if there_s > ready_s[then]:
                            ready_s[then] = there_s
                    waits[then] = left = waits[then] - 1
                    if left:
                        continue
                    there, there_s = lane_of[then], ready_s[then]
                    if there_s <= now and directly[there]:
                        heappush(ready[there], rank[then])
                        if idle[there]:
                            touched.append(there)
                    else:
                        there_s = there_s if there_s > now else now
                        heappush(events, (there_s, then))
                        if choose is not None:
                            choose.known(then, there_s)
            del ended[:]
            if choose is not None and touched:
                self._ask(choose, now)
                continue
            for lane in touched:
                if idle[lane] and ready[lane]:
                    task = by_rank[lane][heappop(ready[lane])]
                    idle[lane] = False
                    start_s[task] = now
                    begun.append(task)
                    if sharing is None or not sharing.begin(task, seconds[task], now):
                        heappush(events, (now + seconds[task], -1 - task))
            del touched[:]
            if sharing is not None:
                self._end_shared(sharing)
            if not events:
                return
            now, task = heappop(events)
            while True:
                if task < 0:
                    task = -1 - task
                    lane = lane_of[task]
                    idle[lane] = True
                    if choose is None:
                        end_s[task] = now
                        ended.append(task)
                        if waiting and task in waiting:
                            woken += waiting.pop(task)
                else:
                    lane = lane_of[task]
                    if self.by_time[lane]:
                        rank[task] = len(by_rank[lane])
                        by_rank[lane].append(task)
                    heappush(ready[lane], rank[task])
                touched.append(lane)
                # Everything that happens now comes before a lane chooses.
                if not events or events[0][0] > now:
                    break
                task = heappop(events)[1]

    def _run_ahead(self) -> None:
        """Run lanes with a fixed order as far as the ends of what they wait for are known."""
        woken, waiting = self.woken, self.waiting
        while woken:
            lane = woken.pop()
            if (source := next(lane, None)) is not None:
                waiting.setdefault(source, []).append(lane)

    def _in_order(self, lane: Sequence[int]) -> Iterator[int]:
        """Run a lane with a fixed order; yield each task that it waits for whose end is not known."""
        start_s, end_s, seconds = self.start_s, self.end_s, self.tasks.seconds
        sources, lags, following = self.tasks.before
        ended, woken, waiting, chooses, now = self.ended, self.woken, self.waiting, self.chooses, 0.0
        for task in lane:
            edge = task
            while True:
                there_s = end_s[sources[edge]] + lags[edge]
                if there_s > now:
                    now = there_s
                elif there_s != there_s:  # NaN
                    yield sources[edge]
                    continue
                edge = following[edge]
                if edge < 0:
                    break
            start_s[task] = now
            end_s[task] = now = now + seconds[task]
            if task in waiting:
                woken += waiting.pop(task)
            if chooses:
                ended.append(task)

    def _ask(self, choose: Choose, now: float) -> None:
        """Ask what the first free lane begins; other lanes then know what will be ready."""
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
        now = min(sharing.end_s.values(), default=float("inf"))
        if not self.events or now <= self.events[0][0]:
            for task in sharing.ended(now):
                self.end_s[task] = now
                heappush(self.events, (now, -1 - task))


@dataclass(frozen=True)
class LaneWork:
    """Holds tasks on lanes, and edges between them.

    The tasks of lane i are ``lane_starts[i]:lane_starts[i + 1]``; a target starts when its source is done, on
    another lane ``lag_s`` later.  ``shared``: which share of a device each task needs, and the device of each
    lane (-1: none); tasks of a device that together need more than 1 slow each other down.
    """

    duration_s: Floats
    lane_starts: Ints
    lane_kinds: Ints
    source: Ints
    target: Ints
    lag_s: Floats
    shared: tuple[Floats, Ints] | None = None

    @property
    def lane_of(self) -> Ints:
        return np.repeat(np.arange(len(self.lane_starts) - 1, dtype=np.int32), np.diff(self.lane_starts))

    def times(self) -> tuple[Floats, Floats]:
        """Return start and end of each task in seconds; NaN for a task that can never start (a deadlock)."""
        bounds, kinds, lane = self.lane_starts.tolist(), self.lane_kinds, self.lane_of
        source, target, lag_s, sharing = self.source, self.target, self.lag_s, None
        if self.shared is not None:
            # Nobody knows how long a task takes, so no lane can run ahead of the clock.
            occupancy, lane_device = self.shared
            sharing = Sharing(lane_device[lane].tolist(), occupancy.tolist())
            kinds = np.where(kinds == LaneKind.ORDERED, LaneKind.PRIORITY, kinds)
            before = np.flatnonzero((self.lane_kinds == LaneKind.ORDERED)[lane])
            before = before[~np.isin(before + 1, self.lane_starts)]
            source, target = np.concatenate([source, before]), np.concatenate([target, before + 1])
            lag_s = np.concatenate([lag_s, np.zeros(len(before))])
        else:
            in_order = (lane[source] == lane[target]) & (source < target)
            says_more = ~(in_order & (kinds == LaneKind.ORDERED)[lane[source]])
            source, target, lag_s = source[says_more], target[says_more], lag_s[says_more]
        lanes = list(map(range, bounds, bounds[1:]))
        times = run(Tasks(self.duration_s, source, target, lag_s), lanes, kinds.tolist(), sharing=sharing)
        return np.array(times.start_s, float), np.array(times.end_s, float)

    def fullest_s(self) -> float:
        """Return the least seconds of the tasks that share a device: as if all of it were always busy."""
        if self.shared is None:
            return 0.0
        occupancy, lane_device = self.shared
        device = lane_device[self.lane_of]
        sharing = device >= 0
        return float(np.bincount(device[sharing], (occupancy * self.duration_s)[sharing]).max(initial=0.0))
