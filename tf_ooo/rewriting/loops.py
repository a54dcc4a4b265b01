"""The layer that each while loop runs with: a loop is not cut, its ops are one task.

A forward loop belongs to the highest layer whose weights its results depend on, its gradient's loop to the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grappler_passes.graph.contexts import EXITS
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import OpKind, TrainingGraph

_HELD = (OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE)


@dataclass(frozen=True)
class LoopTask:
    """One while loop, with those inside it: its ops (Enters and Exits too), its kind (F, dO, dW, U), its
    layer.

    ``inseparable``: (lowest, highest) layer whose weights it reads; no cut may part them.  A loop of tied
    weights may run with a layer above these.
    """

    members: tuple[str, ...]
    kind: str
    layer: int
    inseparable: tuple[int, int]


def forward_loops(graph: TrainingGraph, index: GraphIndex) -> list[list[str]]:
    """Return the ops of each forward loop."""
    loops = (nodes for nodes in _members(graph, index).values() if _is_forward(graph, index, nodes))
    return [[index.names[i] for i in nodes] for nodes in loops]


def loop_tasks(graph: TrainingGraph, index: GraphIndex, layers: Mapping[str, int]) -> list[LoopTask]:
    """Return the loops of a micro-batch's graph, each behind those whose results it reads.

    ``layers``: of forward ops, where weights or readers tell.
    The gradient of a loop that runs with a part of its layer, behind its weights, is one that the part below
    waits for: dO, though only weights' gradients need it.
    """
    members = _members(graph, index)
    if not members:
        return []
    read = _weights_read(graph, index, members)
    forward = {frame for frame, nodes in members.items() if _is_forward(graph, index, nodes)}
    last = len(graph.layers) - 1
    known = {frame: _known(graph, index, nodes, layers) for frame, nodes in members.items()}
    layer_of = {frame: max(known[frame], default=last) for frame in forward}
    for frame in members.keys() - forward:
        above = _of_forward_loops(graph, index, members, frame, {f: layer_of[f] for f in forward})
        layer_of[frame] = max(above or read[frame] or known[frame], default=last)
    return [
        LoopTask(
            tuple(index.names[i] for i in nodes),
            "F" if frame in forward else _backward_kind(graph, index, nodes, layer_of[frame]),
            layer_of[frame],
            (min(read[frame]), max(read[frame])) if read[frame] else (layer_of[frame], layer_of[frame]),
        )
        for frame, nodes in sorted(members.items(), key=lambda item: _first_result(index, item[1]))
    ]


def _first_result(index: GraphIndex, nodes: Sequence[int]) -> int:
    """The place of the first Exit: behind all that goes into the loop, and before all that reads it."""
    exits = (i for i in nodes if index.ops[i] in EXITS and index.contexts[i].output_frame == ())
    return min((index.position[i] for i in exits), default=0)


def _members(graph: TrainingGraph, index: GraphIndex) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for i, name in enumerate(index.names):
        frame = index.contexts[i].frame or index.arrival_frame(i)
        if frame and graph.ops[name].kind in _HELD:
            members.setdefault(frame[0], []).append(i)
    return members


def _is_forward(graph: TrainingGraph, index: GraphIndex, nodes: Sequence[int]) -> bool:
    """Most of its ops are: gradient loops have some that only count, forward loops some that only store."""
    forward = sum(graph.ops[index.names[i]].kind is OpKind.FORWARD for i in nodes)
    return 2 * forward > len(nodes)


def _backward_kind(graph: TrainingGraph, index: GraphIndex, nodes: Sequence[int], layer: int) -> str:
    kinds = {graph.ops[index.names[i]].kind for i in nodes}
    if OpKind.WEIGHT_GRAD in kinds and not graph.layers[layer].variables:
        return "dO"
    if OpKind.OUTPUT_GRAD in kinds or OpKind.FORWARD in kinds and OpKind.WEIGHT_GRAD not in kinds:
        return "dO"
    return "dW" if OpKind.WEIGHT_GRAD in kinds else "U"


def _known(
    graph: TrainingGraph, index: GraphIndex, nodes: Sequence[int], layers: Mapping[str, int]
) -> list[int]:
    names = [index.names[i] for i in nodes]
    forward = [layers[n] for n in names if n in layers and graph.ops[n].kind is OpKind.FORWARD]
    return forward or [layers[n] for n in names if n in layers]


def _weights_read(
    graph: TrainingGraph, index: GraphIndex, members: Mapping[str, Sequence[int]]
) -> dict[str, set[int]]:
    """Return the layers of the weights that come into each loop, cast or reshaped or as they are."""
    own = {
        v.handle: layer.index for layer in graph.layers for v in graph.variables if v.name in layer.variables
    }
    only: dict[int, frozenset[int]] = {}  # what depends on weights alone: whose
    for i in index.order:
        sources = [p for p, _ in index.data_preds[i]]
        if index.names[i] in own:
            only[i] = frozenset({own[index.names[i]]})
        elif sources and all(p in only for p in sources):
            only[i] = frozenset().union(*(only[p] for p in sources))
        elif index.ops[i] == "Const":
            only[i] = frozenset()
    return {frame: {layer for i in nodes for layer in only.get(i, ())} for frame, nodes in members.items()}


def _of_forward_loops(
    graph: TrainingGraph,
    index: GraphIndex,
    members: Mapping[str, Sequence[int]],
    frame: str,
    layer_of: Mapping[str, int],
) -> list[int]:
    """The layers of the forward loops, of those in ``layer_of``, whose results the loop ``frame`` reads."""
    loop_of = {i: name for name, nodes in members.items() for i in nodes}
    layers: list[int] = []
    seen: set[int] = set()
    stack = [p for i in members[frame] for p, _ in index.data_preds[i] if loop_of.get(p) != frame]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        if loop_of.get(i) in layer_of:
            layers.append(layer_of[loop_of[i]])
        elif i not in loop_of and graph.ops[index.names[i]].kind is OpKind.FORWARD:
            stack += [p for p, _ in index.data_preds[i]]
    return layers


def fed_to_loops(
    graph: TrainingGraph, index: GraphIndex, layers: Mapping[str, int], loops: Sequence[LoopTask]
) -> dict[str, int]:
    """Forward ops outside that no weight leads to and only loops read: with the lowest of these loops."""
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
