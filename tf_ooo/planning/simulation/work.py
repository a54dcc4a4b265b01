"""Tasks on lanes in arrays, as the simulator makes them, and how they are run on the clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints
from tf_ooo.planning.simulation.clock import LaneKind, Sharing, Tasks, run


@dataclass(frozen=True)
class LaneWork:
    """Tasks on lanes, and edges between them.

    The tasks of lane i are ``lane_starts[i]:lane_starts[i + 1]``; a target starts when its source is done, on
    another lane ``lag_s`` later.  Tasks of a device that together need more than 1 of ``occupancy`` slow each
    other down.
    """

    duration_s: Floats
    lane_starts: Ints
    lane_kinds: Ints
    source: Ints
    target: Ints
    lag_s: Floats
    occupancy: Floats | None = None
    lane_device: Ints | None = None

    @property
    def lane_of(self) -> Ints:
        return np.repeat(np.arange(len(self.lane_starts) - 1, dtype=np.int32), np.diff(self.lane_starts))

    def times(self) -> tuple[Floats, Floats]:
        """Return start and end of each task in seconds; NaN where it can never start (a deadlock)."""
        bounds, kinds = self.lane_starts.tolist(), self.lane_kinds
        source, target, lag_s, sharing = self.source, self.target, self.lag_s, None
        if self.occupancy is not None and self.lane_device is not None:
            # Nobody knows how long a task takes, so no lane can run ahead of the clock.
            sharing = Sharing(self.lane_device[self.lane_of].tolist(), self.occupancy.tolist())
            kinds = np.where(kinds == LaneKind.ORDERED, LaneKind.PRIORITY, kinds)
            before = np.flatnonzero((self.lane_kinds == LaneKind.ORDERED)[self.lane_of])
            before = before[~np.isin(before + 1, self.lane_starts)]
            source, target = np.concatenate([source, before]), np.concatenate([target, before + 1])
            lag_s = np.concatenate([lag_s, np.zeros(len(before))])
        else:
            lane = self.lane_of
            in_order = (lane[source] == lane[target]) & (source < target)
            says_more = ~(in_order & (kinds == LaneKind.ORDERED)[lane[source]])
            source, target, lag_s = source[says_more], target[says_more], lag_s[says_more]
        lanes = [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        times = run(Tasks(self.duration_s, source, target, lag_s), lanes, kinds.tolist(), sharing=sharing)
        count = len(self.duration_s)
        return np.fromiter(times.start_s, float, count), np.fromiter(times.end_s, float, count)
