"""GraphDefs and what stands in their nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def parse_graph_def(data: bytes) -> Any:
    """A GraphDef from its serialized form."""
    from tensorflow.core.framework import graph_pb2

    return graph_pb2.GraphDef.FromString(data)


def is_graph_def(value: Any) -> bool:
    """Whether a value is a GraphDef message."""
    from tensorflow.core.framework import graph_pb2

    return isinstance(value, graph_pb2.GraphDef)


def tensor_proto(value: Any) -> Any:
    """A value as it stands in a constant node."""
    import tensorflow as tf

    return tf.make_tensor_proto(value)


def keep_colocations(node: Any, kept: Callable[[str], bool]) -> None:
    """Takes from a node the wish to stand beside nodes that are not ``kept``, by name; changes the node."""
    wishes = node.attr["_class"].list.s if "_class" in node.attr else ()
    left = [wish for wish in wishes if kept(wish.decode().removeprefix("loc:@"))]
    if len(left) == len(wishes):
        return
    del node.attr["_class"]
    if left:
        node.attr["_class"].list.s.extend(left)
