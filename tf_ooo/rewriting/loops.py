"""Finds the layers that use each weight, and the layer of each while loop, whose ops are one task.

A forward loop belongs to the highest layer whose weights its results depend on; so does its gradient's loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from grappler_passes.graph.dependencies import EXITS, SWITCHES, GraphIndex, reached
from grappler_passes.graph.training_graph import OpKind, TrainingGraph

_USING = ("ReadVariable", "ResourceGather", "Assign", "ResourceApply", "ResourceSparse", "ResourceScatter")
_PASSING_ON = ("Enter", *SWITCHES, "Identity")
_DATA = ("_Arg", "Placeholder", "PlaceholderWithDefault")


def ops_of_data(graph: TrainingGraph) -> set[str]:
    """Return the ops that depend on data, not only on variables and constants."""
    using = (op for op in graph.ops.values() if op.type.startswith(_USING))
    handles = {_source(graph, op.inputs[0][0]) for op in using if op.inputs}
    names: set[str] = set()
    for name, op in graph.ops.items():
        starts = op.type in _DATA and name not in handles
        if starts or any(producer in names for producer in op.producers):
            names.add(name)
    return names


def layers_of_weights(graph: TrainingGraph, of_data: Collection[str]) -> dict[str, set[int]]:
    """Return the layers of the weights (or handles) that an op depends on, for ops that depend on no data."""
    owner = {variable: layer.index for layer in graph.layers for variable in layer.variables}
    layers: dict[str, set[int]] = {}
    for variable in graph.variables:
        if variable.name in owner:
            layers.setdefault(variable.handle, set()).add(owner[variable.name])
    for name, op in graph.ops.items():
        read = [layers[producer] for producer in op.producers if producer in layers]
        if read and name not in of_data:
            layers[name] = layers.get(name, set()).union(*read)
    return layers


def layers_using(
    graph: TrainingGraph, forward: Mapping[str, int], of_data: Collection[str]
) -> list[set[int]]:
    """Return for each layer the layers whose forward ops apply its weights to data: several if tied."""
    layers = layers_of_weights(graph, of_data)
    using: list[set[int]] = [set() for _ in graph.layers]
    for name in forward.keys() & of_data:
        for producer in graph.ops[name].producers:
            for layer in layers.get(producer, ()):
                using[layer].add(forward[name])
    return using


def _source(graph: TrainingGraph, name: str) -> str:
    while name in graph.ops and graph.ops[name].type in _PASSING_ON and graph.ops[name].inputs:
        name = graph.ops[name].inputs[0][0]
    return name


_HELD = (OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE)


@dataclass(frozen=True)
class LoopTask:
    """Holds a while loop and those within: its ops (Enters and Exits too), kind (F, dO, dW, U) and layer.

    ``inseparable``: the (lowest, highest) layer whose weights it reads; no cut may separate these.  A loop of
    tied weights may run with a layer above these.
    """

    members: tuple[str, ...]
    kind: str
    layer: int
    inseparable: tuple[int, int]


def members_of_loops(index: GraphIndex) -> dict[str, list[int]]:
    """Return the ops of each while loop by its frame; a loop's ops include those of loops within it."""
    members: dict[str, list[int]] = {}
    for i in range(len(index)) if index.frame_names else ():
        frame = index.contexts[i].frame or index.arrival_frame(i)
        if frame:
            members.setdefault(frame[0], []).append(i)
    return members


def forward_loops(graph: TrainingGraph, index: GraphIndex) -> list[list[str]]:
    """Return the ops of each forward loop."""
    loops = _Loops(graph, index)
    return [[index.names[i] for i in loops.members[frame]] for frame in loops.forward]


def loop_tasks(graph: TrainingGraph, index: GraphIndex, layers: Mapping[str, int]) -> list[LoopTask]:
    """Return the loops of a micro-batch's graph, each behind the loops whose results it reads.

    ``layers`` are those of forward ops, as far as weights or readers tell. A loop that runs with a part of
    its layer, behind the weights, has a gradient that the part below waits for: the gradient is dO, though
    only weights' gradients need it.
    """
    loops = _Loops(graph, index)
    read = loops.weights_read() if loops.members else {}
    last = len(graph.layers) - 1
    known = {frame: loops.known(frame, layers) for frame in loops.members}
    layer_of = {frame: max(known[frame], default=last) for frame in loops.forward}
    for frame in loops.members.keys() - layer_of.keys():
        above = [layer_of[each] for each in loops.forward_read_by(frame)]
        layer_of[frame] = max(above or read[frame] or known[frame], default=last)
    return [
        LoopTask(
            tuple(index.names[i] for i in loops.members[frame]),
            "F" if frame in loops.forward else loops.backward_kind(frame, layer_of[frame]),
            layer_of[frame],
            (min(read[frame]), max(read[frame])) if read[frame] else (layer_of[frame], layer_of[frame]),
        )
        for frame in sorted(loops.members, key=loops.first_result)
    ]


class _Loops:
    """Holds the loops of a graph by frame: the ``members`` of all, and the ``forward`` loops.

    In a forward loop most ops are forward ops; some only store. In a gradient's loop some only count.
    """

    def __init__(self, graph: TrainingGraph, index: GraphIndex) -> None:
        self._graph, self._index = graph, index
        held = {
            frame: [i for i in nodes if self._kind(i) in _HELD]
            for frame, nodes in members_of_loops(index).items()
        }
        self.members = {frame: nodes for frame, nodes in held.items() if nodes}
        self.forward = [
            frame
            for frame, nodes in self.members.items()
            if 2 * sum(self._kind(i) is OpKind.FORWARD for i in nodes) > len(nodes)
        ]

    def _kind(self, i: int) -> OpKind:
        return self._graph.ops[self._index.names[i]].kind

    def first_result(self, frame: str) -> int:
        """Return the place of the first Exit: behind the loop's inputs and before all that reads the loop."""
        index = self._index
        exits = (i for i in self.members[frame] if index.ops[i] in EXITS)
        places = (index.position[i] for i in exits if index.contexts[i].output_frame == ())
        return min(places, default=0)

    def backward_kind(self, frame: str, layer: int) -> str:
        kinds = set(map(self._kind, self.members[frame]))
        if OpKind.WEIGHT_GRAD in kinds and not self._graph.layers[layer].variables:
            return "dO"
        if OpKind.OUTPUT_GRAD in kinds or OpKind.FORWARD in kinds and OpKind.WEIGHT_GRAD not in kinds:
            return "dO"
        return "dW" if OpKind.WEIGHT_GRAD in kinds else "U"

    def known(self, frame: str, layers: Mapping[str, int]) -> list[int]:
        """Return the layers of the loop's forward ops; if none is known, of all its ops."""
        named = {i: self._index.names[i] for i in self.members[frame]}
        forward = [layers[n] for i, n in named.items() if n in layers and self._kind(i) is OpKind.FORWARD]
        return forward or [layers[name] for name in named.values() if name in layers]

    def weights_read(self) -> dict[str, set[int]]:
        """Return for each loop the layers of the weights that enter it, also cast or reshaped."""
        graph, index = self._graph, self._index
        layer_of = {name: layer.index for layer in graph.layers for name in layer.variables}
        own = {v.handle: layer_of[v.name] for v in graph.variables if v.name in layer_of}
        only: dict[int, frozenset[int]] = {}  # the layers of what depends on weights alone
        for i in index.order:
            sources = [p for p, _ in index.data_preds[i]]
            if index.names[i] in own:
                only[i] = frozenset({own[index.names[i]]})
            elif sources and all(p in only for p in sources):
                only[i] = frozenset().union(*(only[p] for p in sources))
            elif index.ops[i] == "Const":
                only[i] = frozenset()
        return {
            frame: {layer for i in nodes for layer in only.get(i, ())}
            for frame, nodes in self.members.items()
        }

    def forward_read_by(self, frame: str) -> set[str]:
        """Return the forward loops whose results the loop reads, directly or through forward ops."""
        preds = self._index.data_preds
        loop_of = {i: name for name, nodes in self.members.items() for i in nodes}

        def following(i: int) -> list[int]:
            outside = i not in loop_of and self._kind(i) is OpKind.FORWARD
            return [p for p, _ in preds[i]] if outside else []

        read = {p for i in self.members[frame] for p, _ in preds[i] if loop_of.get(p) != frame}
        ends = {loop_of[i] for i in reached(read, following) if i in loop_of}
        return ends.intersection(self.forward)


def fed_to_loops(
    graph: TrainingGraph, index: GraphIndex, layers: Mapping[str, int], loops: Sequence[LoopTask]
) -> dict[str, int]:
    """Return forward ops without weights that only loops read, with the lowest of these loops' layers."""
    layer_of = {name: loop.layer for loop in loops for name in loop.members}
    inside = set(layer_of)
    for i in reversed(index.order):
        name = index.names[i]
        if name in inside or name in layers or graph.ops[name].kind is not OpKind.FORWARD:
            continue
        readers = [layer_of[index.names[s]] for s in index.succs[i] if index.names[s] in layer_of]
        if readers:
            layer_of[name] = min(readers)
    return {name: layer for name, layer in layer_of.items() if name not in inside}
