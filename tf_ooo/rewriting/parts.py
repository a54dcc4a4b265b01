"""Cuts layers that are too long for one stage between their ops.

What stands before a layer's weights (preprocessing) and behind them (attention, a loss) becomes layers
without weights.  The ops that use its weights stay together, with all between them.  If a layer has several
while loops (a recurrent one, whose time steps were traced in parts), the first loop keeps the weights, and
each of the others becomes a part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grappler_passes.graph.training_graph import Layer, OpKind, TrainingGraph
from tf_ooo.rewriting.loops import layers_of_weights, ops_of_data

if TYPE_CHECKING:
    from tf_ooo.rewriting.loops import LoopTask  # that module imports TensorFlow

# Each part takes at least this share of the forward pass, on two devices.
LEAST_SHARE = 1 / 16
# No layer is divided with this share.
WHOLE = math.inf
# Schedules have up to four stages on each device.  With eight parts for each of 16 devices plans were 1%
# slower, since there is more to search.
_PARTS_PER_DEVICE = 4
# With more parts planning is slow, and tasks are so short that starting them takes longer.
_MOST_PARTS = 256
# A cut may come later than a part is long enough, up to this factor, if less is sent there.
_LATER = 1.5
# Parts are named like this: ``before dense (1)``, ``later in lstm (1)``, ``join before dense (1)``.
_BEFORE, _BEHIND, _LATER_IN, JOIN_BEFORE, JOIN_BEHIND = _PLACES = (
    "before ",
    "behind ",
    "later in ",
    "join before ",
    "join behind ",
)
_NAME = re.compile(rf"(?:{'|'.join(_PLACES)})(.+) \(\d+\)")


def least_share(devices: int) -> float:
    """Return the least share of the forward pass that a part takes when a model is cut for ``devices``."""
    return min(LEAST_SHARE, 1 / min(_PARTS_PER_DEVICE * devices, _MOST_PARTS))


def divided(
    graph: TrainingGraph,
    forward: Mapping[str, int],
    seconds: Mapping[str, float],
    loops: Sequence[LoopTask] = (),
    share: float = LEAST_SHARE,
) -> tuple[TrainingGraph, dict[str, int]]:
    """Return the graph with a layer for each part, and the layer of each forward op.

    ``graph`` is one micro-batch's, ``forward`` the layer of each of its forward ops.  Each part takes at
    least ``share`` of the forward pass.  Layers with ``loops``, in the order of
    :func:`tf_ooo.rewriting.loops.loop_tasks`, are cut only between these.
    """
    whole = {layer for loop in loops for layer in (loop.layer, *loop.inseparable)}
    least_s = share * sum(
        seconds.get(name, 0.0) for name, op in graph.ops.items() if op.kind is OpKind.FORWARD
    )
    own = _Ops(graph, seconds)
    members: dict[int, list[str]] = {layer.index: [] for layer in graph.layers}
    for name in graph.ops:
        if name in forward:
            members[forward[name]].append(name)
    divisions = {
        index: own.divide(names, graph.layers[index], least_s)
        for index, names in members.items()
        if index not in whole and least_s > 0
    }
    divisions |= {index: own.between_loops(members[index], loops, index) for index in whole}
    if not any(divisions.values()):
        return graph, dict(forward)
    return _renumbered(graph, forward, {index: division for index, division in divisions.items() if division})


@dataclass(frozen=True)
class _Division:
    """Holds the part of each forward op of a layer, the number of parts, and the part with the weights.

    ``behind`` is what later parts are called.
    """

    part_of: Mapping[str, int]
    count: int
    home: int
    behind: str = _BEHIND


class _Ops:
    """Knows which ops of a graph depend on data, and which only on variables and constants."""

    def __init__(self, graph: TrainingGraph, seconds: Mapping[str, float]) -> None:
        self._graph, self._seconds = graph, seconds
        self._of_data = ops_of_data(graph)
        self._layers_of_weights = layers_of_weights(graph, self._of_data)

    def divide(self, names: Sequence[str], layer: Layer, least_s: float) -> _Division | None:
        """Divide the forward ops of a layer, in topological order, into parts; None if it stays whole."""
        line = [name for name in names if name in self._of_data]
        if sum(self._seconds.get(name, 0.0) for name in line) < 2 * least_s:
            return None
        weights = {name for name, layers in self._layers_of_weights.items() if layer.index in layers}
        users = [i for i, n in enumerate(line) if not weights.isdisjoint(self._graph.ops[n].producers)]
        if not users:
            return None
        ends = self._ends(line, range(users[0], users[-1]), least_s)
        if not ends:
            return None
        part_of = {name: sum(end <= i for end in ends) for i, name in enumerate(line)}
        home = part_of[line[users[0]]]
        part_of |= self._without_data(names, part_of, dict.fromkeys(weights, home))
        return _Division(part_of, len(ends) + 1, home)

    def between_loops(self, names: Sequence[str], loops: Sequence[LoopTask], layer: int) -> _Division | None:
        """Make each forward loop of the layer a part; None if it has only one, or they read other weights.

        The weights may be those of several layers (of cells on one another, a GRU's), of which this is the
        highest.  Ops that depend on no loop belong to the first part, which has the weights.
        """
        forward = (loop for loop in loops if loop.kind == "F")
        own = [loop for loop in forward if loop.inseparable[0] <= layer <= loop.inseparable[1]]
        if len(own) < 2 or any(loop.layer != layer or loop.inseparable != own[0].inseparable for loop in own):
            return None
        loop_of = {name: number for number, loop in enumerate(own) for name in loop.members}
        part_of = {name: loop_of.get(name, 0) for name in names}
        for name in names:
            if name not in loop_of:
                producers = (p for p in self._graph.ops[name].producers if p in part_of)
                part_of[name] = max(map(part_of.__getitem__, producers), default=0)
        return _Division(part_of, len(own), 0, _LATER_IN)

    def _ends(self, line: Sequence[str], together: range, least_s: float) -> list[int]:
        """Return where the parts end; each end is the place of the next part's first op."""
        crossing = self._crossing_bytes(line)
        seconds = [self._seconds.get(name, 0.0) for name in line]
        left_s = list(itertools.accumulate(reversed(seconds)))[::-1]
        ends: list[int] = []
        while True:
            best, start = 0, ends[-1] if ends else 0
            for i in range(start, len(line) - 1):
                taken_s = left_s[start] - left_s[i + 1]
                if left_s[i + 1] < least_s or (best and taken_s > _LATER * least_s):
                    break
                less = not best or crossing[i] < crossing[best - 1]
                if i not in together and taken_s >= least_s and less:
                    best = i + 1
            if not best:
                return ends
            ends.append(best)

    def _crossing_bytes(self, line: Sequence[str]) -> list[float]:
        """Return for each place in ``line`` the bytes that ops behind it read from ops up to it."""
        place = {name: i for i, name in enumerate(line)}
        last = list(range(len(line)))
        for i, name in enumerate(line):
            for producer in self._graph.ops[name].producers:
                if producer in place:
                    last[place[producer]] = max(last[place[producer]], i)
        changes = [0.0] * (len(line) + 1)
        for i, name in enumerate(line):
            size = float(self._graph.ops[name].output_bytes or 0)
            changes[i] += size
            changes[last[i]] -= size
        return list(itertools.accumulate(changes[:-1]))

    def _without_data(
        self, names: Sequence[str], part_of: Mapping[str, int], weights: Mapping[str, int]
    ) -> dict[str, int]:
        """Return the parts of ops without data: a weight's own, and the first reader's for all others.

        Ops that nobody reads (a metric's result, behind its update) belong to the last part.
        """
        parts: dict[str, int] = {}
        lowest: dict[str, int] = {}
        last = max(part_of.values())
        for name in reversed(names):
            if name not in part_of:
                parts[name] = weights[name] if name in weights else lowest.get(name, last)
            reader = part_of[name] if name in part_of else parts[name]
            for producer in self._graph.ops[name].producers:
                lowest[producer] = min(lowest.get(producer, reader), reader)
        return parts


def is_part(name: str) -> bool:
    """Return whether a layer of that name is a part without weights."""
    return name.startswith(_PLACES)


def layer_of_part(name: str) -> str | None:
    """Return the name of the divided layer from the name of its part; None if it is no part."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def loops_of_layers(names: Iterable[str]) -> dict[str, int]:
    """Return how many loops each layer cut between loops runs in, from the names of all layers and parts."""
    parts = Counter(layer_of_part(name) for name in names if name.startswith(_LATER_IN))
    return {str(layer): count + 1 for layer, count in parts.items()}


def _renumbered(
    graph: TrainingGraph, forward: Mapping[str, int], divisions: Mapping[int, _Division]
) -> tuple[TrainingGraph, dict[str, int]]:
    layers: list[Layer] = []
    first: list[int] = []
    for layer in graph.layers:
        first.append(len(layers))
        division = divisions.get(layer.index, _Division({}, 1, 0))
        for part in range(division.count):
            if part == division.home:
                layers.append(dataclasses.replace(layer, index=len(layers)))
            else:
                behind = part > division.home
                place = part - division.home if behind else part + 1
                label = f"{division.behind if behind else _BEFORE}{layer.name} ({place})"
                layers.append(Layer(len(layers), (), label=label))
    home = [start + divisions[i].home if i in divisions else start for i, start in enumerate(first)]
    numbered = {
        name: first[layer] + divisions[layer].part_of[name] if layer in divisions else home[layer]
        for name, layer in forward.items()
    }
    return graph.with_layers(layers, home), numbered
