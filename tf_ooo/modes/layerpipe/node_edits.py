"""Nodes of a step that are put in place of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import shape_inference
from grappler_passes.compat.shape_inference import OutputInfo
from grappler_passes.graph.variables import VARIABLE_ATTR
from tf_ooo.compat import keras_variables

_SLOT = {"trainable": False}


def name_variables(
    graph_def: graph_pb2.GraphDef, captured: Sequence[tuple[Any, Any]], variables: Mapping[str, Any]
) -> None:
    """Says in a graph which Keras variables its placeholders are, by unique names.

    Args:
        graph_def: changed in place.
        captured: (tensor outside, placeholder inside).
        variables: Keras variables by name.
    """
    values = {name: keras_variables.value_of(variable) for name, variable in variables.items()}
    by_handle = {id(value.handle): name for name, value in values.items() if value is not None}
    nodes = {node.name: node for node in graph_def.node}
    for outside, placeholder in captured:
        node = nodes.get(placeholder.op.name)
        if node is not None and id(outside) in by_handle:
            # Legacy optimizers give fused ops the handles of their slots alone: of those nothing is known.
            known = json.loads(node.attr[VARIABLE_ATTR].s) if VARIABLE_ATTR in node.attr else _SLOT
            node.attr[VARIABLE_ATTR].s = json.dumps({**known, "name": by_handle[id(outside)]}).encode()


@dataclass(frozen=True)
class TwoParts:
    """An op in two parts: its nodes, the first part's name, and outputs by name."""

    nodes: tuple[node_def_pb2.NodeDef, ...]
    high: str
    outputs: dict[str, Sequence[OutputInfo]]


def in_two_parts(
    node: node_def_pb2.NodeDef, infos: Sequence[OutputInfo], gradient: int, sizes: int | None, share: float
) -> TwoParts:
    """The nodes that compute an op on the first ``share`` of the rows and on the rest, and join them.

    Args:
        node: the NodeDef; the joined result gets its name.
        infos: of its inputs.
        gradient: the input that is divided by rows.
        sizes: the input that holds the shape of the result, None where there is none.
        share: between 0 and 1; each part has at least one row, of a single row the rest.
    """
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(tf.as_dtype(i.dtype), i.shape, f"input_{n}") for n, i in enumerate(infos)
        ]
        with tf.name_scope(f"{node.name}_parts"):
            rows = tf.shape(inputs[gradient])[0]
            first = tf.cast(tf.round(tf.cast(rows, tf.float32) * share), tf.int32)
            first = tf.minimum(tf.maximum(first, 1), rows - 1)
            counts = [first, rows - first]
            pieces = tf.split(inputs[gradient], tf.stack(counts), num=2)
            results = []
            for number, piece in enumerate(pieces):
                given = list(inputs)
                given[gradient] = piece
                if sizes is not None:
                    given[sizes] = tf.concat([[counts[number]], inputs[sizes][1:]], 0)
                results.append(_again(graph, node, given, f"part_{number}"))
        joined = tf.concat(results, 0, name=node.name)
    names = {f"input_{n}": text for n, text in enumerate(t for t in node.input if t[0] != "^")}
    nodes = []
    for part in graph.as_graph_def().node:
        if part.name in names:
            continue
        renamed = [names.get(text.partition(":")[0], text) for text in part.input]
        del part.input[:]
        part.input.extend(renamed)
        nodes.append(part)
    outputs = {op.name: [shape_inference.info_of(t) for t in op.outputs] for op in graph.get_operations()}
    assert joined.op.name == node.name, "the name of the divided op is taken"
    return TwoParts(tuple(nodes), results[0].op.name, {n.name: outputs[n.name] for n in nodes})


def _again(graph: Any, node: node_def_pb2.NodeDef, inputs: Sequence[Any], name: str) -> Any:
    attributes = {key: value for key, value in node.attr.items() if key not in ("_class", "_output_shapes")}
    operation = graph.create_op(
        node.op, list(inputs), attrs=attributes, name=name, dtypes=None, compute_device=False
    )
    return operation.outputs[0]


def add_mean(
    graph_def: graph_pb2.GraphDef, node: node_def_pb2.NodeDef, total: str, before: str, share: str
) -> None:
    """Makes of an Identity of x the product of ``share`` and ``total``, which is the sum of x and ``before``.

    ``before`` and ``share`` are placeholders.
    """
    for name in (before, share):
        placeholder = graph_def.node.add(name=name, op="Placeholder")
        placeholder.attr["dtype"].CopyFrom(node.attr["T"])
    added = graph_def.node.add(name=total, op="AddV2", input=[node.input[0], before])
    added.attr["T"].CopyFrom(node.attr["T"])
    node.op, node.input[:] = "Mul", [total, share]


def gather_from_read(graph_def: graph_pb2.GraphDef, node: node_def_pb2.NodeDef, read: str, axis: str) -> None:
    """Makes of a ResourceGather a GatherV2 from the whole variable, which the new node ``read`` reads."""
    import tensorflow as tf

    dims = node.attr["batch_dims"].i if "batch_dims" in node.attr else 0
    reader = graph_def.node.add(name=read, op="ReadVariableOp", input=[node.input[0]])
    reader.attr["dtype"].CopyFrom(node.attr["dtype"])
    constant = graph_def.node.add(name=axis, op="Const")
    constant.attr["dtype"].type = tf.int32.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(dims, tf.int32))
    node.op = "GatherV2"
    node.input[0] = read
    node.input.insert(2, axis)
    node.attr["Tparams"].CopyFrom(node.attr["dtype"])
    node.attr["Taxis"].type = tf.int32.as_datatype_enum
    node.attr["batch_dims"].i = dims
    for name in ("dtype", "validate_indices"):
        node.attr.pop(name, None)
