"""Numbers a model's branches one after the other, so that a stage can hold a whole branch.

Numbered by depth, the layers of two towers alternate.  Where two branches meet that both take long enough,
all layers are reordered so that each branch is followed to its end.  What joins the branches becomes a layer
without weights: in a layer of one branch it would make that layer wait for the other branch.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grappler_passes.graph.flow import bits_of, union
from grappler_passes.graph.training_graph import Layer, OpKind, TrainingGraph, layers_of_weights_and_readers
from tf_ooo.rewriting.loops import layers_of_weights, ops_of_data
from tf_ooo.rewriting.parts import JOIN_BEFORE, JOIN_BEHIND

_FORWARD = (OpKind.FORWARD, OpKind.OTHER)


@dataclass(frozen=True)
class Branches:
    """Holds the graph with its layers numbered branch by branch.

    Attributes:
        graph: also has a layer for each join of branches; the original graph if there are no branches.
        found: whether there are branches.
        joins: the ops that begin a join's layer, with its number.
        shared: ops without weights that several branches read: in a task they would make others wait for it.
    """

    graph: TrainingGraph
    found: bool = False
    joins: Mapping[str, int] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()


def branch_by_branch(
    graph: TrainingGraph, together: Sequence[Collection[str]], seconds: Mapping[str, float], share: float
) -> Branches:
    """Return the graph numbered branch by branch, if two that meet take ``share`` of the forward pass each.

    ``together`` holds the ops of each forward loop.
    """
    flow = _Flow(graph, together)
    of_layers = flow.layer_seconds(seconds)
    least_s = share * sum(of_layers)
    meeting = {name: pairs for name in flow.names if (pairs := flow.branches_at(name, of_layers, least_s))}
    if not meeting or any(bits >> layer & 1 for layer, bits in enumerate(flow.inputs)):
        return Branches(graph)
    order = depth_first(flow.inputs, [_by_number(layer.name) for layer in graph.layers])
    place = {layer: number for number, layer in enumerate(order)}
    before = flow.first_reader([name for name in meeting if not flow.applied[name]], place)
    numbered, numbers = _with_joins(graph, order, set(before.values()))
    beside = [0] * len(graph.layers)
    for one, other in itertools.chain.from_iterable(meeting.values()):
        for these, those in ((one, other), (other, one)):
            for layer in bits_of(these):
                beside[layer] |= those
    shared = flow.read_beside(beside)
    if sum(seconds.get(name, 0.0) for name in shared) >= least_s:
        shared = frozenset()
    return Branches(numbered, True, {name: numbers[reader] for name, reader in before.items()}, shared)


def depth_first(inputs: Sequence[int], keys: Sequence[Any]) -> list[int]:
    """Order layers depth first; ``inputs`` holds for each layer, as bits, all layers that it depends on.

    Each layer comes behind what it depends on, and a branch is followed to its end before the next begins; of
    two branches the one with the smaller key comes first.  A chain keeps its order.
    """

    def in_turn(layers: Iterable[int]) -> list[int]:
        return sorted(layers, key=lambda layer: (keys[layer], layer))

    direct = [bits & ~union(inputs[layer] for layer in bits_of(bits)) for bits in inputs]
    readers: list[list[int]] = [[] for _ in inputs]
    for layer, bits in enumerate(direct):
        for source in bits_of(bits):
            readers[source].append(layer)
    order: dict[int, None] = {}
    waiting = in_turn(layer for layer, bits in enumerate(inputs) if not bits)[::-1]
    while waiting:
        layer = waiting[-1]
        missing = in_turn(source for source in bits_of(direct[layer]) if source not in order)
        if layer not in order and missing:
            waiting.append(missing[0])
            continue
        waiting.pop()
        if layer not in order:
            order[layer] = None
            waiting.extend(in_turn(readers[layer])[::-1])
    return list(order)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``dense_9`` before ``dense_10``; layers' numbers do not order branches."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _with_joins(
    graph: TrainingGraph, order: Sequence[int], read_by: Collection[int | None]
) -> tuple[TrainingGraph, dict[int | None, int]]:
    """Add a layer before each of ``read_by``, for the join that it reads; return the graph and their numbers.

    None stands for a join that no layer reads: its layer comes last.
    """
    layers: list[Layer] = []
    numbers: list[int] = [0] * len(order)
    of_joins: dict[int | None, int] = {}
    for layer in order:
        if layer in read_by:
            of_joins[layer] = len(layers)
            layers.append(Layer(len(layers), (), label=f"{JOIN_BEFORE}{graph.layers[layer].name} (1)"))
        numbers[layer] = len(layers)
        layers.append(dataclasses.replace(graph.layers[layer], index=len(layers)))
    if None in read_by:
        of_joins[None] = len(layers)
        layers.append(Layer(len(layers), (), label=f"{JOIN_BEHIND}{layers[-1].name} (1)"))
    return graph.with_layers(layers, numbers), of_joins


class _Flow:
    """Finds the layers that each forward op on data depends on, as bits.

    Attributes:
        names: the forward ops on data.
        reached: for each of these ops the layers that its result depends on.
        applied: the layers whose weights an op is the first to use; a regularizer's sum uses them again.
    """

    def __init__(self, graph: TrainingGraph, together: Sequence[Collection[str]]) -> None:
        self._graph, of_data = graph, ops_of_data(graph)
        weights = layers_of_weights(graph, of_data)
        self.names = [n for n, op in graph.ops.items() if n in of_data and op.kind in _FORWARD]
        inside = set(self.names)
        self._layer_of = layers_of_weights_and_readers(graph, together)
        self._read = {name: [p for p in graph.ops[name].producers if p in inside] for name in self.names}
        taken = {name: [weights.get(p, ()) for p in graph.ops[name].producers] for name in self.names}
        self.reached = {
            name: union(1 << layer for layers in taken[name] for layer in layers) for name in self.names
        }
        self._loops = [own for names in together if (own := inside.intersection(names))]
        while self._grown():
            pass
        self._upstream = {name: self._reached_by(self._read[name]) for name in self.names}
        for names in self._loops:
            outside = {p for name in names for p in self._read[name]} - names
            self._upstream.update(dict.fromkeys(names, self._reached_by(outside)))
        self.applied = {
            name: union(1 << min(layers) for layers in taken[name] if len(layers) == 1)
            & ~self._upstream[name]
            for name in self.names
        }

    def _reached_by(self, names: Iterable[str]) -> int:
        return union(self.reached[name] for name in names)

    def _grown(self) -> bool:
        """Pass on what each op reaches; return whether a loop reaches more than before."""
        for name in self.names:
            self.reached[name] |= self._reached_by(self._read[name])
        grown = False
        for names in self._loops:
            all_of_it = self._reached_by(names)
            grown = grown or any(self.reached[name] != all_of_it for name in names)
            self.reached.update(dict.fromkeys(names, all_of_it))
        return grown

    @cached_property
    def inputs(self) -> list[int]:
        """Return the layers that each layer depends on, directly or not; itself if its weights are shared."""
        inputs = [0] * len(self._graph.layers)
        for name in self.names:
            for layer in bits_of(self.applied[name]):
                inputs[layer] |= self._upstream[name]
        while (grown := [own | union(inputs[layer] for layer in bits_of(own)) for own in inputs]) != inputs:
            inputs = grown
        return inputs

    def branches_at(self, name: str, seconds: Sequence[float], least_s: float) -> list[tuple[int, int]]:
        """Return the pairs of branches, as layers, that meet in an op and each take long enough."""
        pairs = []
        for one, other in itertools.combinations(sorted({self.reached[p] for p in self._read[name]}), 2):
            alone = one & ~other, other & ~one
            if all(alone) and all(sum(seconds[layer] for layer in bits_of(own)) >= least_s for own in alone):
                pairs.append(alone)
        return pairs

    def layer_seconds(self, seconds: Mapping[str, float]) -> list[float]:
        """Return the seconds of each layer's forward pass."""
        sums = [0.0] * len(self._graph.layers)
        for name, layer in self._layer_of.items():
            sums[layer] += seconds.get(name, 0.0)
        return sums

    def first_reader(self, names: Collection[str], place: Mapping[int, int]) -> dict[str, int | None]:
        """Return for each op the first layer in order of ``place`` that reads its result, or None."""
        first: dict[str, int] = {}
        for name in reversed(self.names):
            reading = [*bits_of(self.applied[name]), *([first[name]] if name in first else [])]
            for producer in self._read[name] if reading else ():
                known = [first[producer]] if producer in first else []
                first[producer] = min([*known, *reading], key=place.__getitem__)
        return {name: first.get(name) for name in names}

    def read_beside(self, beside: Sequence[int]) -> frozenset[str]:
        """Return the ops that depend on no weights and are read by layers of parallel branches."""
        reading = dict.fromkeys(self.names, 0)
        shared: set[str] = set()
        for name in reversed(self.names):
            own = reading[name]
            if self.reached[name]:
                own = 1 << self._layer_of[name]
            elif any(beside[layer] & own for layer in bits_of(own)):
                shared.add(name)
            for producer in self._read[name]:
                reading[producer] |= own
        return frozenset(shared)
