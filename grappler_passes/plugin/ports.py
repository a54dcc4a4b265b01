"""The dtypes of a node's inputs and outputs, read off its op definition and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from grappler_passes.compat import op_types

if TYPE_CHECKING:
    from tensorflow.core.framework import attr_value_pb2, node_def_pb2, op_def_pb2


class PortError(Exception):
    """A node lacks an attribute its op needs, or an output that is asked for."""


def input_types(node: node_def_pb2.NodeDef) -> list[int] | None:
    """``DataType`` numbers of the data inputs; None for an op TensorFlow did not register (a function)."""
    op_def = op_types.op_def(node.op)
    return None if op_def is None else _types(node, op_def, op_def.input_arg)


def output_types(node: node_def_pb2.NodeDef) -> list[int] | None:
    """``DataType`` numbers of the outputs; None for an op TensorFlow did not register (a function)."""
    op_def = op_types.op_def(node.op)
    return None if op_def is None else _types(node, op_def, op_def.output_arg)


def _types(
    node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef, args: Iterable[op_def_pb2.OpDef.ArgDef]
) -> list[int]:
    types: list[int] = []
    for arg in args:
        if arg.type_list_attr:
            types.extend(_attr(node, op_def, arg.type_list_attr).list.type)
            continue
        count = _attr(node, op_def, arg.number_attr).i if arg.number_attr else 1
        dtype = _attr(node, op_def, arg.type_attr).type if arg.type_attr else arg.type
        types.extend([dtype] * count)
    return types


def _attr(node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef, name: str) -> attr_value_pb2.AttrValue:
    """The attribute, or its default: TensorFlow may leave defaults out."""
    if name in node.attr:
        return node.attr[name]
    for attr in op_def.attr:
        if attr.name == name and attr.HasField("default_value"):
            return attr.default_value
    raise PortError(f"{node.op} {node.name!r} has no attribute {name!r}")
