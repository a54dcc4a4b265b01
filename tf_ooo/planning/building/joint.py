"""Schedules jointly over regions (EuroSys 2022, doi 10.1145/3492321.3519563): each dW beside the part of one
device's main stream where it gains most.

Regions, one for each dO and each forward of the next step, are filled greedily, subject to dependencies and
memory: a delayed dW keeps its input and its dO alive.  Gains are measured (option ``gains``), or follow from
``LayerCosts.occupancy``: two kernels that need shares a and b of the device save ``2 - max(1, a + b)`` of
each overlapped second.  Without either, streams do not slow each other down, an upper bound.  Launches that a
dW keeps out of CUDA graphs (option ``capture``) are taken off its gain and added to the step.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
from collections.abc import Callable, Iterator, Mapping

from tf_ooo.costs.table import Gains
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import first_or_leanest, on_paper, within_limit
from tf_ooo.planning.building.regions import Capture, CapturedRuns, MainStream, Regions, own, schedule
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.simulator import simulate

# A schedule under this name is simulated to choose a placement; a policy gives it its own name.
_TRIED = "tried"
# If two regions gain nearly the same, the earlier one is taken: less memory, and less that may go wrong.
_PER_REGION_OF_DELAY = 1e-4
_LEAST_GAIN = 1e-3


def check(problem: Problem, policy: str) -> None:
    """Raise OptionsError, naming the policy, unless there is one device and one micro-batch."""
    if problem.devices != 1 or problem.microbatches != 1:
        given = f"{problem.devices} devices, {problem.microbatches} micro-batches"
        raise OptionsError(f"schedule {policy!r} takes one device and one micro-batch, got {given}")


def best_placement(problem: Problem) -> Regions:
    """Return the placement that simulates fastest within memory; all on the main stream if none fits."""
    layers = range(len(problem.layers))
    filled = fill(problem)
    own_only = {layer: None if region is None else own(layer) for layer, region in filled.items()}
    tried: list[Regions] = [filled, own_only, {layer: own(layer) for layer in layers}]
    if problem.memory_limit_bytes is not None:
        tried = [least_retreat(problem, placement) for placement in tried]
    tried.append(dict.fromkeys(layers))
    order = sorted(tried, key=functools.partial(step_s, problem))
    schedules = [schedule(_TRIED, problem, placement) for placement in order]
    return order[schedules.index(first_or_leanest(problem, schedules))]


def step_s(problem: Problem, placement: Regions) -> float:
    """Return the simulated seconds of one step, with the cost of its launches."""
    tried, capture = schedule(_TRIED, problem, placement), _capture_of(problem)
    lost_s = 0.0 if capture is None else capture.lost_s(len(problem.layers), placement)
    if not problem.flag("delay", True):
        return lost_s + simulate(tried, problem.layers, problem.link, steps=1).makespan_s
    return lost_s + on_paper(problem, tried).steady_step_s


def calculated_gains(problem: Problem) -> dict[tuple[str, int], float]:
    """Return ``{(region, layer): seconds}`` of all pairs that gain by occupancy, each taken alone."""
    gains = _Gains(dataclasses.replace(problem, options={"delay": problem.flag("delay", True)}))
    return {(str(gains.stream.regions[place]), layer): gain for gain, place, layer in gains.all_pairs()}


def fill(problem: Problem) -> Regions:
    """Fill greedily: the pair with the largest gain goes first, into the room left in its regions."""
    gains = _Gains(problem)
    placement: dict[int, Task | None] = dict.fromkeys(range(len(problem.layers)))
    heap = [(-gain, place, layer) for gain, place, layer in gains.all_pairs()]
    heapq.heapify(heap)
    while heap:
        _, place, layer = heapq.heappop(heap)
        if placement[layer] is not None:
            continue
        gain = gains.of(place, layer)
        if gain < gains.least(layer):
            continue
        if heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, place, layer))  # others have taken some of its room
            continue
        placement[layer] = gains.stream.regions[place]
        gains.take(place, layer)
    return placement


class _Gains:
    """Holds the seconds that a dW saves by beginning in a region, given the room left in the regions."""

    def __init__(self, problem: Problem) -> None:
        self.layers = problem.layers
        self.stream = MainStream(len(problem.layers), problem.flag("delay", True))
        pairs = [(problem.layers[region.stage], region.kind == "dO") for region in self.stream.regions]
        self.length_s = [cost.output_grad_s if back else cost.forward_s for cost, back in pairs]
        self.share = [(c.occupancy or (0, 0, 0))[1 if back else 0] for c, back in pairs]
        self.free_s = list(self.length_s)
        table = _checked(problem.options.get("gains"), self.stream)
        self._saved_s = self._calculated_s if table is None else functools.partial(self._measured_s, table)
        capture = _capture_of(problem)
        self.runs = None if capture is None else CapturedRuns(capture, len(problem.layers))

    def all_pairs(self) -> Iterator[tuple[float, int, int]]:
        """Yield (gain, place, layer) of all pairs that gain anything."""
        for layer in range(1, len(self.layers)):
            for place in self.stream.allowed(layer):
                gain = self.of(place, layer)
                if gain >= self.least(layer):
                    yield gain, place, layer

    def least(self, layer: int) -> float:
        """Return the least gain for which a dW is moved."""
        return max(_LEAST_GAIN * self.layers[layer].weight_grad_s, 1e-12)

    def of(self, place: int, layer: int) -> float:
        """Return the seconds gained; a long dW goes on into the regions that follow."""
        if self.free_s[place] <= 0:
            return 0.0
        delay = place - self.stream.allowed(layer).start
        saved_s = self._saved_s(place, layer) * (1 - _PER_REGION_OF_DELAY) ** delay
        return saved_s if self.runs is None else saved_s - self.runs.of(place, layer)

    def _calculated_s(self, place: int, layer: int) -> float:
        own_share = (self.layers[layer].occupancy or (0, 0, 0))[2]
        used = self._used(place, layer)
        return sum(used_s * (2 - max(1.0, self.share[at] + own_share)) for at, used_s in used)

    def _measured_s(self, table: Gains, place: int, layer: int) -> float:
        """Return the gain measured side by side, in proportion to the part for which there is room."""

        def gain(at: int) -> float:
            return table.get((str(self.stream.regions[at]), layer), 0.0)

        whole_s = self.layers[layer].weight_grad_s
        if not whole_s:  # nothing is known of it but the table
            return gain(place) * (self.free_s[place] / self.length_s[place])
        used = self._used(place, layer)
        return sum(gain(at) * (used_s / min(whole_s, self.length_s[at])) for at, used_s in used)

    def take(self, place: int, layer: int) -> None:
        for at, used_s in self._used(place, layer):
            self.free_s[at] -= used_s
        if self.runs is not None:
            self.runs.take(place, layer)

    def _used(self, place: int, layer: int) -> Iterator[tuple[int, float]]:
        left_s = self.layers[layer].weight_grad_s
        for at in range(place, self.stream.allowed(layer).stop):
            used_s = min(left_s, self.free_s[at])
            if used_s > 0:
                yield at, used_s
            left_s -= used_s
            if left_s <= 0:
                return


def _capture_of(problem: Problem) -> Capture | None:
    capture = problem.options.get("capture")
    if capture is not None and not isinstance(capture, Capture):
        raise OptionsError(f"capture must be a Capture, got {capture!r:.60}")
    return capture


def _checked(gains: object, stream: MainStream) -> Gains | None:
    if gains is None:
        return None
    if not isinstance(gains, Mapping):
        raise OptionsError(f"gains must be a map {{(region, layer): seconds}}, got {gains!r:.60}")
    names = {str(region) for region in stream.regions}
    for key, saved_s in gains.items():
        good = isinstance(key, tuple) and len(key) == 2 and key[0] in names and key[1] in range(stream.layers)
        if not good or not isinstance(saved_s, (int, float)) or not abs(saved_s) < float("inf"):
            expected = "expected ('dO:5' or 'F:3', layer) and finite seconds"
            raise OptionsError(f"gains[{key!r}]={saved_s!r}: {expected}")
    return gains


def least_retreat(problem: Problem, placement: Regions) -> Regions:
    """Move as few dW back to their own region, then to the main stream, as memory needs, largest first."""
    stream = MainStream(len(problem.layers))

    def held(layer: int) -> float:
        region = placement[layer]
        delay = stream.place(region) - stream.allowed(layer).start if region is not None else 0
        return -(delay + 1) * problem.layers[layer].kept_bytes

    moved = sorted((layer for layer, region in placement.items() if region is not None), key=held)
    for back in (own, lambda _: None):
        placement = _retreat(problem, placement, moved, back)
    return placement


def _retreat(
    problem: Problem, placement: Regions, moved: list[int], back: Callable[[int], Task | None]
) -> Regions:
    """Move as few of ``moved`` back, in order, as memory needs; all where even that is not enough."""

    def trial(count: int) -> Regions:
        return {**placement, **{layer: back(layer) for layer in moved[:count]}}

    def fits(count: int) -> bool:
        return within_limit(problem, schedule(_TRIED, problem, trial(count)))

    return trial(bisect.bisect_left(range(len(moved)), True, key=fits))
