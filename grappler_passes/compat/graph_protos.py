"""GraphDefs and what stands in their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_pb2


def parse_graph_def(data: bytes) -> graph_pb2.GraphDef:
    """Return a GraphDef from its serialized form."""
    from tensorflow.core.framework import graph_pb2

    return graph_pb2.GraphDef.FromString(data)


def is_graph_def(value: object) -> TypeGuard[graph_pb2.GraphDef]:
    """Return whether a value is a GraphDef message."""
    from tensorflow.core.framework import graph_pb2

    return isinstance(value, graph_pb2.GraphDef)


def tensor_proto(value: bool | int | float | str) -> tensor_pb2.TensorProto:
    """Return a value as it stands in a constant node."""
    import tensorflow as tf

    return tf.make_tensor_proto(value)


def zero_of(dtype: int) -> tensor_pb2.TensorProto:
    """Return a zero, False or an empty text, as it stands in a constant node; ``dtype`` as in nodes.

    TypeError: a type without values, such as that of a variable's handle.
    """
    import tensorflow as tf

    kind = tf.as_dtype(dtype)
    if kind in (tf.resource, tf.variant):
        raise TypeError(f"{kind.name} has no zero")
    return tf.make_tensor_proto("" if kind == tf.string else kind.as_numpy_dtype(0), kind)


def copy_of(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return a deep copy, to be changed."""
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    return copy


def with_nodes(graph_def: graph_pb2.GraphDef, nodes: Iterable[node_def_pb2.NodeDef]) -> graph_pb2.GraphDef:
    """Return the graph with copies of these nodes in place of its own; the library stays."""
    out = copy_of(graph_def)
    del out.node[:]
    out.node.extend(nodes)
    return out


def keep_colocations(node: node_def_pb2.NodeDef, kept: Callable[[str], bool]) -> None:
    """Takes from a node the wish to stand beside nodes that are not ``kept``, by name; changes the node."""
    wishes = node.attr["_class"].list.s if "_class" in node.attr else ()
    left = [wish for wish in wishes if kept(wish.decode().removeprefix("loc:@"))]
    if len(left) == len(wishes):
        return
    del node.attr["_class"]
    if left:
        node.attr["_class"].list.s.extend(left)
