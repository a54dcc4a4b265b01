"""The layer that each while loop runs with: a loop is not cut, its ops are one task.

A forward loop belongs to the layers whose weights it reads, its gradient's loop to the same ones.  Ops that
no weight leads to, such as the counters and the stacks of activations, go with their loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grappler_passes.dependencies import GraphIndex
from grappler_passes.graph import OpKind, TrainingGraph

_HELD = (OpKind.FORWARD, OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD, OpKind.UPDATE)


@dataclass(frozen=True)
class LoopTask:
    """One while loop, with those inside it.

    Attributes:
        members: ops, Enters and Exits included.
        kind: F, dO, dW or U.
        layer: that it runs with.
        glued: (lowest, highest) layer whose weights it reads; no cut may part them.
    """

    members: tuple[str, ...]
    kind: str
    layer: int
    glued: tuple[int, int]


def loop_tasks(graph: TrainingGraph, index: GraphIndex, layers: Mapping[str, int]) -> list[LoopTask]:
    """The loops of a micro-batch's graph.

    Args:
        graph, index: of one micro-batch.
        layers: of its forward ops whose layer their weights or their readers tell.
    """
    members = _members(graph, index)
    if not members:
        return []
    read = _weights_read(graph, index, members)
    forward = {frame for frame, nodes in members.items() if _is_forward(graph, index, nodes)}
    homes: dict[str, set[int]] = {}
    for frame in (*sorted(forward), *sorted(members.keys() - forward)):
        homes[frame] = read[frame]
        if not homes[frame] and frame not in forward:
            homes[frame] = _of_forward_loops(graph, index, members, frame, homes)
        if not homes[frame]:
            homes[frame] = {max(_known(index, members[frame], layers), default=len(graph.layers) - 1)}
    return [
        LoopTask(
            tuple(index.names[i] for i in nodes),
            "F" if frame in forward else _backward_kind(graph, index, nodes),
            max(homes[frame]),
            (min(homes[frame]), max(homes[frame])),
        )
        for frame, nodes in members.items()
    ]


def _members(graph: TrainingGraph, index: GraphIndex) -> dict[str, list[int]]:
    """The ops of each outermost loop, by its frame."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(index.names):
        frame = index.contexts[i].frame or index.arrival_frame(i)
        if frame and graph.ops[name].kind in _HELD:
            found.setdefault(frame[0], []).append(i)
    return found


def _is_forward(graph: TrainingGraph, index: GraphIndex, nodes: Sequence[int]) -> bool:
    """Most of its ops are: gradient loops have some that only count, forward loops some that only store."""
    forward = sum(graph.ops[index.names[i]].kind is OpKind.FORWARD for i in nodes)
    return 2 * forward > len(nodes)


def _backward_kind(graph: TrainingGraph, index: GraphIndex, nodes: Sequence[int]) -> str:
    kinds = {graph.ops[index.names[i]].kind for i in nodes}
    if OpKind.OUTPUT_GRAD in kinds or OpKind.FORWARD in kinds and OpKind.WEIGHT_GRAD not in kinds:
        return "dO"
    return "dW" if OpKind.WEIGHT_GRAD in kinds else "U"


def _known(index: GraphIndex, nodes: Sequence[int], layers: Mapping[str, int]) -> list[int]:
    return [layers[index.names[i]] for i in nodes if index.names[i] in layers]


def _weights_read(
    graph: TrainingGraph, index: GraphIndex, members: Mapping[str, Sequence[int]]
) -> dict[str, set[int]]:
    """The layers of the weights that come into each loop, cast or reshaped or as they are."""
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
    homes: Mapping[str, set[int]],
) -> set[int]:
    """The layers of the highest of the forward loops whose results the loop ``frame`` reads."""
    loop_of = {i: name for name, nodes in members.items() for i in nodes}
    found: list[set[int]] = []
    seen: set[int] = set()
    stack = [p for i in members[frame] for p, _ in index.data_preds[i] if loop_of.get(p) != frame]
    while stack:
        i = stack.pop()
        if i in seen or graph.ops[index.names[i]].kind is not OpKind.FORWARD:
            continue
        seen.add(i)
        if i in loop_of:
            found.append(homes.get(loop_of[i], set()))
        else:
            stack += [p for p, _ in index.data_preds[i]]
    return max(found, key=lambda layers: max(layers, default=-1), default=set())


def fed_to_loops(
    graph: TrainingGraph, index: GraphIndex, layers: Mapping[str, int], loops: Sequence[LoopTask]
) -> dict[str, int]:
    """Forward ops outside that no weight leads to and only loops read: with the lowest of these loops."""
    found = {name: loop.layer for loop in loops for name in loop.members}
    inside = set(found)
    for i in reversed(index.order):
        name = index.names[i]
        if name in inside or name in layers or graph.ops[name].kind is not OpKind.FORWARD:
            continue
        readers = [found[index.names[s]] for s in index.succs[i] if index.names[s] in found]
        if readers:
            found[name] = min(readers)
    return {name: layer for name, layer in found.items() if name not in inside}
