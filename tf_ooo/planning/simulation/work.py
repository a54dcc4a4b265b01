"""What the engine runs: nodes on lanes, in plain arrays."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints


class LaneKind(enum.IntEnum):
    """How a lane takes its next node."""

    ORDERED = 0
    PRIORITY = 1
    FIFO = 2


@dataclass(frozen=True)
class LaneWork:
    """Nodes on lanes, and edges between them.

    Attributes:
        duration_s: float64 (nodes,).
        lane_starts: int64 (lanes + 1,): the nodes of lane i are ``lane_starts[i]:lane_starts[i + 1]``,
            in order (ORDERED) or the most urgent first (PRIORITY).
        lane_kinds: int8 (lanes,), see LaneKind.  Lanes run one node at a time, to its end.
        source, target: int (edges,): the target starts ``lag_s`` after the end of the source, or later.
        lag_s: float64 (edges,).
        occupancy: float64 (nodes,), share of its device that a node keeps busy while it runs; nodes of
            one device that together need more than 1 slow each other down.  None: they do not.
        lane_device: int32 (lanes,), needed with ``occupancy``.
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
    def fixed(self) -> bool:
        """Whether every lane's order is given, so that the times are longest paths."""
        return self.occupancy is None and not np.any(self.lane_kinds)
