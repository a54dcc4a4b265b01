"""One micro-batch of a step whose micro-batches are unrolled, with the updates behind it.

Micro-batch m is marked as step m (``steps.py``), what comes once as the step behind the last, sums with
SUM_ATTR.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.node_input import control_inputs, data_inputs, make_identity, split_input
from grappler_passes.graph.parts import part_of, with_inputs

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

    Each sum becomes an Identity of this micro-batch's gradient; control edges from what is left out go.
    ``count`` is the number, in ``steps``, of what comes once.
    """
    # A constant that a sum of slices needs carries the mark too, and hands on nothing.
    sums = {i for i, node in enumerate(graph_def.node) if is_sum(node) and data_inputs(node)}
    handed_on = {
        i: source
        for i in sums
        if (source := _handed_on(graph_def.node[i], index, sums, steps, number)) is not None
    }

    def reads(i: int) -> list[int]:
        if i in handed_on:
            return [index.index[split_input(handed_on[i])[0]]]
        return [producer for producer, _ in index.data_preds[i]]

    chosen = [i for i, step in enumerate(steps) if step in (number, count)]
    graph = part_of(graph_def, index, with_inputs(index, chosen, reads))
    for node in graph.node:
        source = handed_on.get(index.index[node.name])
        if source is not None:
            make_identity(node, [source, *control_inputs(node)])
    return graph


def _handed_on(
    node: node_def_pb2.NodeDef,
    index: GraphIndex,
    sums: Collection[int],
    steps: Sequence[int | None],
    number: int,
) -> str | None:
    """The input of a sum that leads to this micro-batch's gradient; None: the sum stands before it."""
    inputs = data_inputs(node)
    if node.op in _CONCAT:
        inputs = inputs[:-1] if node.op == "ConcatV2" else inputs[1:]
    producers = [index.index[split_input(text)[0]] for text in inputs]
    for text, producer in zip(inputs, producers, strict=True):
        if producer not in sums and steps[producer] == number:
            return text
    step = steps[index.index[node.name]]
    if step is None or step <= number:
        return None
    return next((text for text, p in zip(inputs, producers, strict=True) if p in sums), inputs[0])
