"""The discrete-event simulation behind :mod:`tf_ooo.planning.simulation.engine`: one heap of times."""

from __future__ import annotations

import heapq

import numpy as np

from tf_ooo.planning.model.arrays import Floats
from tf_ooo.planning.simulation.work import LaneKind, LaneWork

_ORDERED, _PRIORITY = int(LaneKind.ORDERED), int(LaneKind.PRIORITY)  # compared millions of times
_FINISH, _ARRIVE = 0, 1


def run_events(work: LaneWork) -> tuple[Floats, Floats]:
    """Start and end of each node, see :func:`tf_ooo.planning.simulation.engine.run`."""
    simulation = _Simulation(work)
    simulation.run()
    return np.array(simulation.start), np.array(simulation.end)


class _Simulation:
    def __init__(self, work: LaneWork) -> None:
        count = len(work.duration_s)
        starts = np.asarray(work.lane_starts)
        self.lane_of: list[int] = work.lane_of.tolist()
        self.kinds: list[int] = np.asarray(work.lane_kinds).tolist()
        self.duration: list[float] = np.asarray(work.duration_s).tolist()
        self.successors: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        self.waiting = [0] * count
        self.start = [float("nan")] * count
        self.end = [float("nan")] * count
        self.events: list[tuple[float, int, int, int]] = []
        self.ready: list[list[tuple[int, int]]] = [[] for _ in self.kinds]
        self.idle = [True] * len(self.kinds)
        self.to_dispatch: list[int] = []
        self.serial = 0
        self.shared = None if work.occupancy is None else _SharedDevices(work)
        columns = (np.asarray(column).tolist() for column in (work.source, work.target, work.lag_s))
        for source, target, lag in zip(*columns, strict=True):
            self.successors[source].append((target, lag))
            self.waiting[target] += 1
        for lane, kind in enumerate(self.kinds):
            if kind == _ORDERED:
                for node in range(int(starts[lane]), int(starts[lane + 1]) - 1):
                    self.successors[node].append((node + 1, 0.0))
                    self.waiting[node + 1] += 1

    def run(self) -> None:
        for node in [node for node, count in enumerate(self.waiting) if not count]:
            self.is_ready(node, 0.0)
        self.dispatch(0.0)
        while self.events:
            now = self.events[0][0]
            # Everything that ends now comes before a lane chooses, so that the most urgent is there.
            while self.events and self.events[0][0] <= now:
                _, serial, what, node = heapq.heappop(self.events)
                if what == _ARRIVE:
                    self.arrive(node, now)
                elif self.shared is None or self.shared.is_current(node, serial):
                    self.finish(node, now)
            self.dispatch(now)

    def push(self, time_s: float, what: int, node: int) -> int:
        self.serial += 1
        heapq.heappush(self.events, (time_s, self.serial, what, node))
        return self.serial

    def arrive(self, node: int, now: float) -> None:
        self.waiting[node] -= 1
        if not self.waiting[node]:
            self.is_ready(node, now)

    def is_ready(self, node: int, now: float) -> None:
        lane = self.lane_of[node]
        kind = self.kinds[lane]
        if kind == _ORDERED:
            self.begin(node, now)
            return
        self.serial += 1
        heapq.heappush(self.ready[lane], (node if kind == _PRIORITY else self.serial, node))
        self.to_dispatch.append(lane)

    def dispatch(self, now: float) -> None:
        lanes, self.to_dispatch = self.to_dispatch, []
        for lane in lanes:
            if self.idle[lane] and self.ready[lane]:
                self.idle[lane] = False
                self.begin(heapq.heappop(self.ready[lane])[1], now)

    def begin(self, node: int, now: float) -> None:
        self.start[node] = now
        if self.shared is not None and self.shared.begin(self, node, now):
            return
        self.push(now + self.duration[node], _FINISH, node)

    def finish(self, node: int, now: float) -> None:
        self.end[node] = now
        if self.shared is not None:
            self.shared.finish(self, node, now)
        lane = self.lane_of[node]
        if self.kinds[lane] != _ORDERED:
            self.idle[lane] = True
            self.to_dispatch.append(lane)
        for target, lag in self.successors[node]:
            if lag > 0:
                self.push(now + lag, _ARRIVE, target)
            else:
                self.arrive(target, now)


class _SharedDevices:
    """Nodes that run side by side on one device share it: all slow down alike when it is full."""

    def __init__(self, work: LaneWork) -> None:
        self.device: list[int] = np.asarray(work.lane_device)[work.lane_of].tolist()
        self.occupancy: list[float] = np.asarray(work.occupancy).tolist()
        self.running: dict[int, dict[int, float]] = {}
        self.rate: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.serial_of: dict[int, int] = {}

    def begin(self, simulation: _Simulation, node: int, now: float) -> bool:
        """Takes a node over; False where it takes no part in the sharing (a transfer)."""
        device = self.device[node]
        if device < 0 or not simulation.duration[node]:
            return False
        self._advance(device, now)
        self.running.setdefault(device, {})[node] = simulation.duration[node]
        self._plan_ends(simulation, device, now)
        return True

    def finish(self, simulation: _Simulation, node: int, now: float) -> None:
        device = self.device[node]
        if node in self.running.get(device, {}):
            self._advance(device, now)
            del self.running[device][node]
            self.serial_of[node] = -1
            self._plan_ends(simulation, device, now)

    def is_current(self, node: int, serial: int) -> bool:
        """False for an end that was planned before the rate changed."""
        return self.serial_of.get(node, serial) == serial

    def _advance(self, device: int, now: float) -> None:
        passed_s = (now - self.since.get(device, now)) * self.rate.get(device, 1.0)
        for node in self.running.get(device, {}):
            self.running[device][node] -= passed_s
        self.since[device] = now

    def _plan_ends(self, simulation: _Simulation, device: int, now: float) -> None:
        running = self.running[device]
        needed = sum(self.occupancy[node] for node in running)
        self.rate[device] = rate = 1.0 if needed <= 1 else 1 / needed
        for node, left_s in running.items():
            self.serial_of[node] = simulation.push(now + max(left_s, 0.0) / rate, _FINISH, node)
