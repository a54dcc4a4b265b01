"""The engine's longest paths: all lanes move on side by side, with numpy."""

from __future__ import annotations

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints
from tf_ooo.planning.simulation.work import LaneWork


def run_waves(work: LaneWork) -> tuple[Floats, Floats]:
    """Start and end of each node, of lanes with fixed orders, each of which takes a node in every wave."""
    waves = _Waves(work)
    lanes: Ints = np.flatnonzero(waves.head < waves.stop)
    while len(lanes):
        lanes = waves.step(lanes)
    return waves.start(), waves.end[:-1]


class _Waves:
    """The state of all lanes.

    Most nodes wait for one besides the one before them: that edge is by node, others in ``more``.  What a
    wave reads of a node stands side by side in memory: with tens of millions this decides the speed.
    """

    def __init__(self, work: LaneWork) -> None:
        count = len(work.duration_s)
        starts = np.asarray(work.lane_starts, np.int64)
        # One more than there are nodes: what a node waits for that waits for nothing.
        self.end = np.full(count + 1, np.nan)
        self.end[count] = -np.inf
        self.first, self.stop = starts[:-1], starts[1:]
        self.head, self.clock_s = self.first.copy(), np.zeros(len(self.first))
        self.lane = np.repeat(np.arange(len(starts), dtype=np.int32), [*np.diff(starts), 1])
        # The lane that each lane waits for, and for each wave the lanes that moved.
        self.waits_for = np.full(len(self.first), len(self.first), np.int64)
        self.moved = np.zeros(len(starts), bool)
        # The edges that say more than the order of the lanes does.
        ahead = (self.lane[work.source] == self.lane[work.target]) & (work.source < work.target)
        needed = ~(ahead & (work.lag_s <= 0))
        source, target, lag_s = work.source[needed], work.target[needed], work.lag_s[needed]
        first = np.full(count, -1, np.int64)
        first[target] = np.arange(len(source))
        # Columns: seconds of the node, what it waits for (a whole number).
        self.node = np.empty((count, 2))
        self.node[:, 0] = work.duration_s
        self.node[:, 1] = np.append(source, count)[first]
        self.lag_s = np.append(lag_s, 0.0)[first] if lag_s.any() else None
        self.more = _More(source, target, lag_s, first)

    def step(self, lanes: Ints) -> Ints:
        """Moves those of the given lanes that can; returns those that may move next."""
        nodes = self.head[lanes]
        columns = self.node.take(nodes, axis=0)
        source = columns[:, 1].astype(np.int64)
        ready_s = self._ready_s(nodes, source)
        blocked = np.isnan(ready_s)
        if blocked.any():
            self.waits_for[lanes[blocked]] = self.lane[source[blocked]]
            moving = ~blocked
            nodes, lanes, ready_s, columns = nodes[moving], lanes[moving], ready_s[moving], columns[moving]
        end_s = np.maximum(self.clock_s[lanes], ready_s) + columns[:, 0]
        self.end[nodes] = end_s
        self.clock_s[lanes] = end_s
        self.head[lanes] = nodes + 1
        return self._next(lanes)

    def _ready_s(self, nodes: Ints, source: Ints) -> Floats:
        """Return when what nodes wait for is there, NaN if it is not done; ``source`` becomes what is not."""
        ready_s = self.end[source]
        if self.lag_s is not None:
            ready_s += self.lag_s[nodes]
        if self.more.any:
            self.more.wait(nodes, source, ready_s, self.end)
        return ready_s

    def _next(self, moved: Ints) -> Ints:
        """Return lanes that moved, and lanes that wait for one that did."""
        self.moved[moved] = True
        again = self.moved[self.waits_for] | self.moved[:-1]
        self.moved[moved] = False
        again &= self.head < self.stop
        return np.flatnonzero(again)

    def start(self) -> Floats:
        before_s = np.empty(len(self.node))
        before_s[1:] = self.end[:-2]
        before_s[self.first[self.first < self.stop]] = 0.0
        start_s = np.maximum(
            before_s, self._ready_s(np.arange(len(self.node)), self.node[:, 1].astype(np.int64))
        )
        return np.where(np.isnan(self.end[:-1]), np.nan, start_s)


class _More:
    """Second and further edges into one node, sorted by the node."""

    def __init__(self, source: Ints, target: Ints, lag_s: Floats, first: Ints) -> None:
        beyond = np.flatnonzero(first[target] != np.arange(len(target)))
        self.any = bool(len(beyond))
        if not self.any:
            return
        beyond = beyond[np.argsort(target[beyond], kind="stable")]
        self.source, self.lag_s = source[beyond], lag_s[beyond]
        counts = np.bincount(target[beyond], minlength=len(first))
        self.starts = np.concatenate([[0], np.cumsum(counts)])

    def wait(self, nodes: Ints, source: Ints, ready_s: Floats, end: Floats) -> None:
        """Raises ``ready_s``, NaN where something is not done; ``source`` becomes what is not."""
        first, stop = self.starts[nodes], self.starts[nodes + 1]
        places = np.flatnonzero(stop > first)
        if not len(places):
            return
        counts = (stop - first)[places]
        ends = np.cumsum(counts)
        edges = np.repeat(first[places] - (ends - counts), counts) + np.arange(int(ends[-1]))
        then_s = end[self.source[edges]] + self.lag_s[edges]
        # maximum, unlike fmax, keeps NaN.
        latest_s = np.maximum.reduceat(then_s, ends - counts)
        undone = np.flatnonzero(np.isnan(then_s))
        missing = np.full(len(nodes), -1)
        missing[np.repeat(places, counts)[undone]] = self.source[edges[undone]]
        blocked = (missing >= 0) & ~np.isnan(ready_s)
        source[blocked] = missing[blocked]
        ready_s[places] = np.maximum(ready_s[places], latest_s)
