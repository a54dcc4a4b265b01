"""One micro-batch of a step whose micro-batches are unrolled, with the updates behind it.

Whoever unrolls them marks micro-batch m as step m (see ``steps.py``), what comes once, after all of
them, as the step behind the last, and the sums of gradients with :data:`SUM_ATTR`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.node_input import split_input

SUM_ATTR = "_ooo_sum"
_CONCAT = ("ConcatV2", "Concat")
_SUMS = ("AddV2", "Add", "AddN", *_CONCAT)


def is_sum(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node adds the gradients of micro-batches."""
    return SUM_ATTR in node.attr and node.op in _SUMS


def microbatch_graph(
    graph_def: graph_pb2.GraphDef, index: GraphIndex, steps: Sequence[int | None], number: int, count: int
) -> graph_pb2.GraphDef:
    """The graph of a step that has micro-batch ``number`` only: its nodes keep their names.

    Each sum becomes an Identity of this micro-batch's gradient.  Control edges from what is left out
    are left out, so that variables are read as in a first micro-batch.

    Args:
        graph_def: the whole graph, ``index`` made of it.
        steps: of each node, from :func:`grappler_passes.analysis.steps.steps_of`.
        number: the micro-batch, 0 to ``count - 1``; ``count`` is the number of what comes once.
    """
    chosen = _OneMicroBatch(graph_def, index, steps, number, count)
    graph = graph_pb2.GraphDef(versions=graph_def.versions)
    graph.library.CopyFrom(graph_def.library)
    members = chosen.members()
    for i in sorted(members):
        node = graph.node.add()
        node.CopyFrom(graph_def.node[i])
        if i in chosen.instead:
            _make_identity(node, chosen.instead[i])
        kept = [t for t in node.input if t[0] != "^" or index.index[split_input(t)[0]] in members]
        del node.input[:]
        node.input.extend(kept)
    return graph


def _reads_data(node: node_def_pb2.NodeDef) -> bool:
    return any(text[0] != "^" for text in node.input)


class _OneMicroBatch:
    """Which nodes are in the graph, and what each sum in it hands on."""

    def __init__(
        self,
        graph_def: graph_pb2.GraphDef,
        index: GraphIndex,
        steps: Sequence[int | None],
        number: int,
        count: int,
    ) -> None:
        self.index, self.steps, self.number, self.count = index, steps, number, count
        # A constant that a sum of slices needs carries the mark too, and hands on nothing.
        self.sums = {i for i, node in enumerate(graph_def.node) if is_sum(node) and _reads_data(node)}
        self.instead: dict[int, str] = {}
        for i in self.sums:
            source = self._handed_on(i, graph_def.node[i])
            if source is not None:
                self.instead[i] = source

    def _handed_on(self, i: int, node: node_def_pb2.NodeDef) -> str | None:
        """The input of a sum that leads to this micro-batch's gradient; None: the sum stands before it."""
        inputs = [text for text in node.input if text[0] != "^"]
        if node.op in _CONCAT:
            inputs = inputs[:-1] if node.op == "ConcatV2" else inputs[1:]
        producers = [self.index.index[split_input(text)[0]] for text in inputs]
        for text, producer in zip(inputs, producers, strict=True):
            if producer not in self.sums and self.steps[producer] == self.number:
                return str(text)
        earlier = [t for t, p in zip(inputs, producers, strict=True) if p in self.sums]
        step = self.steps[i]
        comes_later = step is not None and step > self.number
        return str((earlier or inputs)[0]) if comes_later else None

    def members(self) -> set[int]:
        wanted = {self.number, self.count}
        nodes = [i for i, step in enumerate(self.steps) if step in wanted]
        members, stack = set(nodes), nodes
        while stack:
            i = stack.pop()
            if i in self.instead:
                producers = [self.index.index[split_input(self.instead[i])[0]]]
            else:
                producers = [p for p, _ in self.index.data_preds[i]]
            for producer in (*producers, *self.index.back_preds.get(i, ())):
                if producer not in members:
                    members.add(producer)
                    stack.append(producer)
        return members


def _make_identity(node: node_def_pb2.NodeDef, source: str) -> None:
    control = [text for text in node.input if text[0] == "^"]
    node.op = "Identity"
    del node.input[:]
    node.input.extend([source, *control])
    for key in [key for key in node.attr if key not in ("T", SUM_ATTR) and not key.startswith("_ooo")]:
        del node.attr[key]
