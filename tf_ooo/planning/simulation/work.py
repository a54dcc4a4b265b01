"""Defines what the engine runs: nodes on lanes, in plain arrays."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from tf_ooo.planning.model.arrays import Floats, Ints


class LaneKind(enum.IntEnum):
    """Says how a lane takes its next node."""

    ORDERED = 0
    PRIORITY = 1
    FIFO = 2


@dataclass(frozen=True)
class LaneWork:
    """Nodes on lanes, in order or the most urgent first, and edges between them.

    The nodes of lane i are ``lane_starts[i]:lane_starts[i + 1]`` and run one at a time, to their ends; a
    target starts ``lag_s`` after its source ends, or later.  Nodes of a device that together need more than 1
    of ``occupancy`` slow each other down.
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
        return np.repeat(np.arange(len(self.lane_starts) - 1), np.diff(self.lane_starts))

    @property
    def fixed(self) -> bool:
        """Return whether every lane's order is given, so that the times are longest paths."""
        return self.occupancy is None and not np.any(self.lane_kinds)
