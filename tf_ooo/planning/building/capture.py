"""Counts launches where a schedule keeps kernels out of CUDA graphs: a term of joint scheduling.

XLA:GPU captures what the main stream runs without interruption, ``least_run`` kernels or more; a call on a
side stream interrupts.  Seen in modules compiled for an H100 (docs/design/xla.md).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.regions import MainStream, Regions

# XLA's own, flag xla_gpu_graph_min_graph_size.
LEAST_RUN = 5


@dataclass(frozen=True)
class Capture:
    """Launches of a step whose stock order is in CUDA graphs.  OptionsError: a number below 0 or infinite.

    ``kernels``: of each F, dO and dW, as ``{"dO:3": 4.0}``.  ``launch_s``: what one takes longer outside of
    CUDA graphs.  ``own``: whether those that a dW itself loses count; not where measured gains include them.
    """

    kernels: Mapping[str, float]
    launch_s: float
    least_run: int = LEAST_RUN
    own: bool = True

    def __post_init__(self) -> None:
        for what, value in (*self.kernels.items(), ("launch_s", self.launch_s)):
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise OptionsError(f"capture: {what} must be a finite number from 0, got {value!r}")

    def lost_s(self, layers: int, placement: Regions) -> float:
        """Return seconds that a placement costs a step; 0 where every dW stays on the main stream."""
        runs = CapturedRuns(self, layers)
        return sum(
            runs.take(runs.stream.place(region), layer)
            for layer, region in sorted(placement.items())
            if region is not None
        )


class CapturedRuns:
    """The main stream's uninterrupted runs, region after region, as dW start beside it."""

    def __init__(self, capture: Capture, layers: int) -> None:
        self.capture, self.stream = capture, MainStream(layers)
        regions = self.stream.regions
        # A step ends with its dO; the next step's forward is a run of its own.
        counts = [capture.kernels.get(str(region), 0.0) for region in regions]
        self._before = [0.0, *itertools.accumulate(counts)]
        self._breaks = [0, layers, 2 * layers]

    def of(self, place: int, layer: int) -> float:
        """Seconds that it costs to start dW of a layer in the region at ``place``."""
        own = self.capture.kernels.get(f"dW:{layer}", 0.0) if self.capture.own else 0.0
        return (own + self._cut(place)) * self.capture.launch_s

    def take(self, place: int, layer: int) -> float:
        """Return the cost as :meth:`of` does, and cut the run."""
        cost_s = self.of(place, layer)
        if place not in self._breaks:
            bisect.insort(self._breaks, place)
        return cost_s

    def _cut(self, place: int) -> float:
        """Kernels that are captured now and not if the run is cut there."""
        after = bisect.bisect_right(self._breaks, place)
        if self._breaks[after - 1] == place:
            return 0.0
        first, last = self._breaks[after - 1], self._breaks[after]
        return self._left_out([(first, place), (place, last)]) - self._left_out([(first, last)])

    def _left_out(self, runs: Iterable[tuple[int, int]]) -> float:
        lengths = (self._before[last] - self._before[first] for first, last in runs)
        return sum(length for length in lengths if length < self.capture.least_run)
