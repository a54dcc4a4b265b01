"""Rows of an embedding that are the same in every micro-batch: positions, which no data choose.

Keras 3's Adam squares each slice of a sparse gradient by itself: a position must come once, as in one batch.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import tensorflow as tf

# More ops than rows of positions take: constants, a range, casts, reshapes, a wrap of negative rows.
_MOST_OPS = 64


def fixed_rows(indices: Any) -> np.ndarray | None:
    """The rows where constants and known shapes give them, each once; None: data may choose them."""
    nodes = _nodes_of(indices.op)
    if nodes is None:
        return None
    with tf.Graph().as_default() as graph:
        graph_def = graph.as_graph_def()
        graph_def.node.extend(nodes)
        (inside,) = tf.import_graph_def(graph_def, return_elements=[indices.name], name="")
        with tf.compat.v1.Session(
            graph=graph, config=tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        ) as session:
            rows = session.run(inside)
    return rows if len(np.unique(rows)) == rows.size else None


def _nodes_of(last: Any) -> list[Any] | None:
    """All that an op is computed from, without places; None: not from constants and shapes alone."""
    nodes: dict[str, Any] = {}
    waiting = [last]
    while waiting:
        op = waiting.pop()
        if op.name in nodes:
            continue
        if len(nodes) == _MOST_OPS or op.control_inputs or _is_open(op):
            return None
        if op.type == "Shape":
            node = _constant_shape(op)
            if node is None:
                return None
        else:
            node = copy.deepcopy(op.node_def)
            waiting.extend(tensor.op for tensor in op.inputs)
        node.device = ""
        if "_class" in node.attr:  # stands beside an op that is not here
            del node.attr["_class"]
        nodes[op.name] = node
    return list(nodes.values())


def _is_open(op: Any) -> bool:
    """Whether it has a state, calls a function, or is fed."""
    functions = any(value.HasField("func") or value.list.func for value in op.node_def.attr.values())
    return op.op_def.is_stateful or functions or op.type.startswith("Placeholder")


def _constant_shape(op: Any) -> Any:
    """A constant in the place of ``Shape``; None: the shape is not known."""
    shape = op.inputs[0].shape
    if not shape.is_fully_defined():
        return None
    with tf.Graph().as_default():
        node = tf.constant(shape.as_list(), op.outputs[0].dtype).op.node_def
    node.name = op.name
    return node
