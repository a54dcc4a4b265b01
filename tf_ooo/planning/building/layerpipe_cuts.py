"""Cuts the line of all layers' tasks into one piece for each processor (arXiv 2108.06629).

A layer's F, dO and dW stand on the line in any order; a cut falls between two, or inside a dO, whose parts
are then on two processors.  The slowest processor is made as fast as possible, then as few bytes as possible
are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from tf_ooo.costs.layer_costs import LayerCosts, layer_inputs
from tf_ooo.errors import OptionsError
from tf_ooo.planning.building.choice import first_within
from tf_ooo.planning.building.pipeline import lane_codes, places
from tf_ooo.planning.model.problem import Problem
from tf_ooo.planning.model.schedule import Lane, Schedule, TaskList
from tf_ooo.planning.model.task import KIND_NUMBER, Fields, Floats, Ints, encode

# A dO is cut at multiples of this; the shares are refined afterwards.
_GRID = 8
_HALVINGS = 20
# Tasks that take less than this share of the whole are not told from none: rounding is near.
_LEAST_SHARE = 1e-9
_WHOLE = ("F", "dO", "dW")
_ORDERS = tuple(itertools.permutations(_WHOLE))
Shares = Mapping[int, tuple[float, float]]
NO_SHARES: Shares = MappingProxyType({})


@dataclass(frozen=True)
class Cut:
    """Describes a cut, ``at_s`` seconds from the left, inside a layer or before it.

    In this ``order``, the layer's first ``before`` tasks are wholly on the left, and ``share`` of the next, a
    dO. The cut may be shifted between ``low_s`` and ``high_s``, the share between ``least`` and ``most``.
    ``sent_bytes`` of a micro-batch cross the cut, weights included.
    """

    at_s: float
    low_s: float
    high_s: float
    layer: int
    order: tuple[str, ...] = ()
    before: int = 0
    share: float = 0.0
    sent_bytes: float = 0.0
    least: float = 1 / 64
    most: float = 63 / 64


@dataclass(frozen=True)
class TaskLine:
    """Holds the layers' work on a line, with all places where the line may be cut, in order."""

    layers: tuple[LayerCosts, ...]
    starts_s: tuple[float, ...]
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerCosts], inside: bool, lower_shares: Shares = NO_SHARES) -> TaskLine:
        """Return the line of layers; ``lower_shares``: the least and most of a layer's dO on the left."""
        work = [sum(seconds(layer).values()) for layer in layers]
        starts = tuple(itertools.accumulate(work, initial=0.0))
        cuts = [
            Cut(starts[i], starts[i], starts[i], i, sent_bytes=_crossing_bytes(layers, i, i))
            for i in range(1, len(layers))
        ]
        if inside:
            for layer in range(len(layers)):
                least, most = lower_shares.get(layer, (0.0, 1.0))
                cuts += [
                    replace(cut, least=max(cut.least, least), most=min(cut.most, most))
                    for cut in _inside(layers, layer, starts[layer], _LEAST_SHARE * starts[-1])
                    if not cut.share or least <= cut.share <= most
                ]
        return cls(tuple(layers), starts, tuple(sorted(cuts, key=lambda cut: (cut.at_s, cut.layer))))


def seconds(layer: LayerCosts) -> dict[str, float]:
    """Return the seconds of each of a layer's tasks; the update runs with dW."""
    return {"F": layer.forward_s, "dO": layer.output_grad_s, "dW": layer.weight_grad_s + layer.update_s}


def _crossing_bytes(layers: Sequence[LayerCosts], before: int, after: int) -> float:
    """Return the bytes of outputs and gradients between layers below ``before`` and from ``after`` on."""
    sources: set[int] = set()
    gradients = 0.0
    for reader in range(after, len(layers)):
        crossing = {source for source in layer_inputs(tuple(layers), reader) if source < before}
        sources |= crossing
        gradients += sum(layers[source].output_bytes for source in crossing)
    return gradients + sum(layers[source].output_bytes for source in sources)


def _inside(layers: Sequence[LayerCosts], layer: int, start_s: float, least_s: float) -> list[Cut]:
    cuts: dict[tuple[tuple[str, ...], int, float], Cut] = {}
    takes = {kind: s for kind, s in seconds(layers[layer]).items() if s > least_s}
    passing = _crossing_bytes(layers, layer, layer + 1)
    for order in dict.fromkeys(tuple(kind for kind in kinds if kind in takes) for kinds in _ORDERS):
        done_s = start_s
        for before, kind in enumerate(order):
            steps = _GRID if kind == "dO" else 1
            for step in range(0 if before else 1, steps):
                share = step / steps
                moves = (done_s, done_s + takes[kind]) if share else (done_s, done_s)
                cut = Cut(done_s + share * takes[kind], *moves, layer, order, before, share)
                cuts[order, before, share] = replace(cut, sent_bytes=passing + _sent_bytes(layers, cut))
            done_s += takes[kind]
    return list(cuts.values())


def left_shares(cut: Cut) -> dict[str, float]:
    """Return the share of each of the cut layer's tasks that is left of the cut."""
    shares = {kind: float(place < cut.before) for place, kind in enumerate(cut.order)}
    if cut.share:
        shares[cut.order[cut.before]] = cut.share
    return shares


def _sent_bytes(layers: Sequence[LayerCosts], cut: Cut) -> float:
    """Return the bytes that the processors left and right of one cut inside a layer send each other."""
    read = sum(layers[source].output_bytes for source in layer_inputs(tuple(layers), cut.layer))
    output, weights = layers[cut.layer].output_bytes, layers[cut.layer].weight_bytes
    left = {"F": 0.0, "dO": 0.0, "dW": 0.0} | left_shares(cut)
    forward_left, weight_left = left["F"] == 1, left["dW"] == 1
    sent = read if not (forward_left and weight_left) else 0.0
    sent += output if forward_left or left["dO"] else 0.0
    sent += output if left["dO"] else 0.0
    sent += output * (1 - left["dO"] if weight_left else left["dO"])
    sent += read * (1 - left["dO"])
    here = (forward_left or left["dO"] > 0, not forward_left or left["dO"] < 1)
    return sent + (weights if here[1 if weight_left else 0] else 0.0)


def best_cuts(line: TaskLine, processors: int, slack: float = 0.0) -> tuple[Cut, ...] | None:
    """Return cuts with fewest bytes, the slowest processor within ``1 + slack`` of the best, or None."""
    search = _CutSearch(line, processors)
    low_s = high_s = line.starts_s[-1] / processors
    if search.cuts(low_s) is None:
        high_s = line.starts_s[-1]
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (middle_s, high_s) if search.cuts(middle_s) is None else (low_s, middle_s)
    cuts = search.cuts(high_s * (1 + slack))
    return None if cuts is None else refined(line, cuts)


class _CutSearch:
    """Finds the cheapest way from the left to the right end in pieces of at most a given length."""

    def __init__(self, line: TaskLine, processors: int) -> None:
        self.line, self.pieces = line, processors
        self.at_s = np.array([cut.at_s for cut in line.cuts])
        self.cost = np.array([cut.sent_bytes for cut in line.cuts])
        self.first_inside = np.searchsorted(
            self.at_s, [line.starts_s[cut.layer] + 1e-12 * line.starts_s[-1] for cut in line.cuts]
        )
        self.same = self._same_layer()

    def _same_layer(self) -> tuple[Ints, Ints]:
        """Return the pairs of cuts that fit together in one layer: one task order, one cut in its dO."""
        by_order: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, cut in enumerate(self.line.cuts):
            if cut.order:
                by_order.setdefault((cut.layer, cut.order), []).append(index)
        pairs = [
            (a, b)
            for group in by_order.values()
            for a, b in itertools.combinations(group, 2)
            if not (self.line.cuts[a].share and self.line.cuts[b].share) and self.at_s[a] < self.at_s[b]
        ]
        table = np.array(pairs, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def cuts(self, longest_s: float) -> list[Cut] | None:
        longest_s *= 1 + 1e-9
        total_s = self.line.starts_s[-1]
        if self.pieces == 1:
            return [] if total_s <= longest_s else None
        reach = np.where(self.at_s <= longest_s, self.cost, np.inf)
        origins: list[Ints] = []
        start = np.searchsorted(self.at_s, self.at_s - longest_s)
        for _ in range(self.pieces - 2):
            reach, origin = self._extend(reach, start)
            origins.append(origin)
        ends = np.where(total_s - self.at_s <= longest_s, reach, np.inf)
        if not len(ends) or not np.isfinite(ends.min()):
            return None
        index = int(ends.argmin())
        cuts = [self.line.cuts[index]]
        for origin in reversed(origins):
            index = int(origin[index])
            cuts.append(self.line.cuts[index])
        return cuts[::-1]

    def _extend(self, reach: Floats, start: Ints) -> tuple[Floats, Ints]:
        """Add a piece: the cheapest cut before each cut, in another layer or in the same one."""
        index = np.arange(len(reach))
        origin = _lowest(reach, start, np.minimum(self.first_inside, index))
        best = np.where(origin >= 0, reach[origin], np.inf)
        # At the same place a cut of the layer before would leave a piece without work.
        best[(origin >= 0) & (self.at_s[origin] >= self.at_s)] = np.inf
        before, after = self.same
        near = before >= start[after]
        before, after = before[near], after[near]
        order = np.argsort(-reach[before], kind="stable")  # the cheapest is written last
        before, after = before[order], after[order]
        inside, inside_origin = np.full(len(reach), np.inf), np.full(len(reach), -1)
        inside[after], inside_origin[after] = reach[before], before
        better = inside < best
        return np.where(better, inside, best) + self.cost, np.where(better, inside_origin, origin)


def _lowest(values: Floats, low: Ints, high: Ints) -> Ints:
    """Return the place of the lowest of ``values[low[i]:high[i]]`` for each i, -1 where there is none."""
    levels = [np.arange(len(values))]
    while 2 ** len(levels) <= len(values):
        half = 2 ** (len(levels) - 1)
        left, right = levels[-1][:-half], levels[-1][half:]
        levels.append(np.where(values[left] <= values[right], left, right))
    lowest = np.full(len(low), -1)
    length = high - low
    for level, lows in enumerate(levels):
        here = (length >= 2**level) & (length < 2 ** (level + 1))
        left, right = lows[low[here]], lows[high[here] - 2**level]
        lowest[here] = np.where(values[left] <= values[right], left, right)
    return lowest


def refined(line: TaskLine, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Shift the cuts inside dO so that the slowest processor is as fast as possible."""
    total_s = line.starts_s[-1]
    best = [cut.at_s for cut in cuts]
    pieces_s = [b - a for a, b in itertools.pairwise([0.0, *best, total_s])]
    low_s, high_s = total_s / len(pieces_s), max(pieces_s)
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        places = _shifted(cuts, middle_s)
        if places is not None and total_s - (places or [0.0])[-1] <= middle_s:
            high_s, best = middle_s, places
        else:
            low_s = middle_s
    return tuple(_moved(cut, at_s) for cut, at_s in zip(cuts, best, strict=True))


def _shifted(cuts: Sequence[Cut], longest_s: float) -> list[float] | None:
    """Shift each cut right as far as ``longest_s`` for the piece before it allows; None: too short."""
    places: list[float] = []
    for cut in cuts:
        width_s = cut.high_s - cut.low_s
        inner = (cut.low_s + width_s * cut.least, cut.high_s - width_s * (1 - cut.most))
        at_s = min((places or [0.0])[-1] + longest_s, inner[1])
        if at_s < inner[0] - 1e-12 * inner[0]:
            return None
        places.append(max(at_s, inner[0]))
    return places


def _moved(cut: Cut, at_s: float) -> Cut:
    if cut.high_s == cut.low_s:
        return cut
    # Beside tasks a million million times as long, rounding may leave the dO.
    share = min(max((at_s - cut.low_s) / (cut.high_s - cut.low_s), cut.least), cut.most)
    return replace(cut, at_s=at_s, share=share)


def whole_layers(name: str, problem: Problem) -> Schedule:
    """Return 1F1B of contiguous stages, within memory if possible. OptionsError: too few layers."""
    count, layers = problem.devices, len(problem.layers)
    cuts = best_cuts(TaskLine.of(problem.layers, inside=False), count)
    if cuts is None:
        raise OptionsError(f"{count} stages are more than the {layers} layers; use fewer devices")
    starts = [0, *(cut.layer for cut in cuts), layers]
    bounds = tuple((first, after - 1) for first, after in itertools.pairwise(starts))
    shape = Schedule("layerpipe", name, microbatches=problem.microbatches, stages=bounds, asynchronous=True)
    shape = replace(shape, fused_backward=True)
    noams = range(count, 0, -1) if problem.memory_limit_bytes != 0 else [1]
    in_flight = ([min(noam, count - stage) for stage in range(count)] for noam in noams)
    return first_within(problem, (_ordered(shape, counts) for counts in in_flight))


def in_rounds(schedule: Schedule) -> Schedule:
    """Order a schedule as ``mode="layerpipe"`` runs it: stage s of p runs 2 (p - 1 - s) rounds ahead."""
    last = len(schedule.stages) - 1
    return _ordered(schedule, [2 * (last - stage) + 1 for stage in range(last + 1)])


def _ordered(schedule: Schedule, in_flight: Sequence[int]) -> Schedule:
    """Order a schedule with so many micro-batches in flight on each stage; an update follows each dW."""
    count, lanes = schedule.microbatches, dict[Lane, TaskList]()
    for stage, most in enumerate(in_flight):
        codes = lane_codes((stage, stage, stage), np.arange(count), places(count, min(most, count), 0))
        fields = Fields.of(codes)
        at = np.flatnonzero(fields.kind == KIND_NUMBER["dW"])
        lanes[stage, 0] = TaskList(np.insert(codes, at + 1, encode("U", stage, fields.microbatch[at])))
    return replace(schedule, lanes=lanes)
