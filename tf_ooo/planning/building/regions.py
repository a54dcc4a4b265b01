"""Places dW on one device with two streams, and counts launches outside of CUDA graphs.

In the words of out-of-order backprop (EuroSys 2022, doi 10.1145/3492321.3519563): ``BWD j``, beside dO of
layer j - 1; ``FWD j``, beside the next step's F of layer j; ``NO``, on the main stream, as always layer 0's.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.step_model import COMPUTE
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Schedule, Task, TaskList

SUB = (0, 1)
_TEXT = re.compile(r"(BWD|FWD) (\d{1,6})|NO", re.ASCII)

Regions = Mapping[int, Task | None]


@dataclass(frozen=True)
class MainStream:
    """Holds regions in order of time: dO downwards; if dW may ``delay``, the next step's F upwards."""

    layers: int
    delay: bool = True

    @property
    def regions(self) -> list[Task]:
        down = range(self.layers - 1, -1, -1)
        return [Task("dO", layer) for layer in down] + [Task("F", layer) for layer in range(self.layers)]

    def place(self, region: Task) -> int:
        return self.layers - 1 - region.stage if region.kind == "dO" else self.layers + region.stage

    def allowed(self, layer: int) -> range:
        """Return where dW of a layer may begin: after its dO, before its next forward (layer 0: nowhere)."""
        return range(self.layers - layer, self.layers + (layer if self.delay else 0))


def schedule(policy: str, problem: Problem, placement: Regions) -> Schedule:
    """Return the two streams; layers that have no region stay on the main one."""
    layers = len(problem.layers)
    stream = MainStream(layers)
    main = [Task("F", layer) for layer in range(layers)]
    for layer in range(layers - 1, -1, -1):
        kinds = ("dO", "dW", "U") if placement.get(layer) is None else ("dO",)
        main += [Task(kind, layer) for kind in kinds]
    moved = {layer: region for layer, region in placement.items() if region is not None}

    def turn(layer: int) -> tuple[int, int]:
        """Sort by region; within F the layer needed first, within dO the layer whose dO was done first."""
        return stream.place(moved[layer]), layer if moved[layer].kind == "F" else -layer

    order = sorted(moved, key=turn)
    sub = [task for layer in order for task in (Task("dW", layer), Task("U", layer))]
    after = [_pin(layer, moved[layer]) for layer in order]
    lanes = {COMPUTE: TaskList(main), **({SUB: TaskList(sub)} if sub else {})}
    return Schedule("single_device", policy, lanes, after=tuple(pin for pin in after if pin))


def _pin(layer: int, region: Task) -> tuple[Task, Task, int] | None:
    """Return the wait of a dW besides its dO: for the main stream's task before the region."""
    weight_grad = Task("dW", layer)
    if region.kind == "F" and region.stage:
        return weight_grad, Task("F", region.stage - 1), 1
    above = 0 if region.kind == "F" else region.stage + 1
    return None if above == layer else (weight_grad, Task("dO", above), 0)


def read(texts: Mapping[int, str], layers: int) -> dict[int, Task | None]:
    """Read a map in words. OptionsError: no such region, a dW before its dO or after its next F."""
    stream = MainStream(layers)
    placement: dict[int, Task | None] = {}
    for layer, text in texts.items():
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None or not isinstance(layer, int) or not 0 <= layer < layers:
            raise OptionsError(f"placement[{layer!r}] must be 'BWD j', 'FWD j' or 'NO', got {text!r}")
        region = None if match[1] is None else _region(match[1], int(match[2]))
        if layer and region is not None and stream.place(region) not in stream.allowed(layer):
            raise OptionsError(
                f"placement[{layer}]={text!r}: dW runs after its dO and before its layer's next forward"
            )
        placement[layer] = region if layer else None
    return placement


def _region(kind: str, layer: int) -> Task:
    if kind == "FWD" or not layer:
        return Task("F", layer)
    return Task("dO", layer - 1)


def own(layer: int) -> Task | None:
    """Return the region right after the layer's dO; None: the main stream."""
    return _region("BWD", layer) if layer else None


def write(placement: Regions) -> dict[int, str]:
    """Return the map in words."""

    def word(region: Task | None) -> str:
        if region is None:
            return "NO"
        return f"BWD {region.stage + 1}" if region.kind == "dO" else f"FWD {region.stage}"

    return {layer: word(region) for layer, region in sorted(placement.items())}


# Counts launches where a schedule keeps kernels out of CUDA graphs: a term of joint scheduling. XLA:GPU
# captures kernels that the main stream runs without interruption, ``least_run`` or more; a call on a side
# stream interrupts. Seen in modules compiled for an H100 (docs/design/xla.md).

# XLA's own, flag xla_gpu_graph_min_graph_size.
LEAST_RUN = 5


@dataclass(frozen=True)
class Capture:
    """Counts a step's launches outside of CUDA graphs. OptionsError: a number is not finite or below 0.

    ``kernels``: how many each F, dO and dW has, as ``{"dO:3": 4.0}``.  ``launch_s``: seconds that one takes
    longer outside of CUDA graphs.  ``own``: whether a dW's own lost kernels count; not where measured gains
    include them.
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
        """Return the seconds that a placement adds to a step; 0 where every dW stays on the main stream."""
        runs = CapturedRuns(self, layers)
        return sum(
            runs.take(runs.stream.place(region), layer)
            for layer, region in sorted(placement.items())
            if region is not None
        )


class CapturedRuns:
    """Holds the main stream's uninterrupted runs, region after region, as dW start beside it."""

    def __init__(self, capture: Capture, layers: int) -> None:
        self.capture, self.stream = capture, MainStream(layers)
        regions = self.stream.regions
        # A step ends with its dO; the next step's forward is a run of its own.
        counts = [capture.kernels.get(str(region), 0.0) for region in regions]
        self._before = [0.0, *itertools.accumulate(counts)]
        self._breaks = [0, layers, 2 * layers]

    def of(self, place: int, layer: int) -> float:
        """Return the seconds that it costs to start dW of a layer in the region at ``place``."""
        own = self.capture.kernels.get(f"dW:{layer}", 0.0) if self.capture.own else 0.0
        return (own + self._cut(place)) * self.capture.launch_s

    def take(self, place: int, layer: int) -> float:
        """Return the cost as :meth:`of` does, and cut the run."""
        cost_s = self.of(place, layer)
        if place not in self._breaks:
            bisect.insort(self._breaks, place)
        return cost_s

    def _cut(self, place: int) -> float:
        """Return the kernels that leave a CUDA graph if the run is cut there."""
        after = bisect.bisect_right(self._breaks, place)
        first, last = self._breaks[after - 1], self._breaks[after]
        return self._left_out(first, place) + self._left_out(place, last) - self._left_out(first, last)

    def _left_out(self, first: int, last: int) -> float:
        length = self._before[last] - self._before[first]
        return length if length < self.capture.least_run else 0.0
