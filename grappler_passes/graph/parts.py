"""A part of a graph as a graph of its own, to look at: it is classified and measured, never run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tensorflow.core.framework import graph_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.graph.dependencies import GraphIndex, reached


def with_inputs(
    index: GraphIndex, nodes: Iterable[int], reads: Callable[[int], Iterable[int]] | None = None
) -> set[int]:
    """Nodes with all that they are computed from, loops whole; ``reads``: producers of what a node reads."""

    def producers(i: int) -> list[int]:
        read = (p for p, _ in index.data_preds[i]) if reads is None else reads(i)
        return [*read, *index.back_preds.get(i, ())]

    return reached(nodes, producers)


def part_of(graph_def: graph_pb2.GraphDef, index: GraphIndex, members: Collection[int]) -> graph_pb2.GraphDef:
    """The graph of these nodes, in their order, without control edges from others; the library is kept."""
    part = graph_protos.with_nodes(graph_def, (graph_def.node[i] for i in sorted(members)))
    for i, node in zip(sorted(members), part.node, strict=True):
        outside = {f"^{index.names[p]}" for p in index.control_preds[i] if p not in members}
        if outside:
            node.input[:] = [text for text in node.input if text not in outside]
    return part
