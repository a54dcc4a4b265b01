"""Functions that TensorFlow has traced: their graphs, and the moment when one has been traced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

HANDLE_SHAPES = "_handle_shapes"
"""Attribute of an ``_Arg``: shapes of what a variable's handle points to."""
VARIABLE_ATTR = "_ooo_variable"
"""This attribute marks arguments that are variables: JSON ``{"name": str, "trainable": bool}``."""


def graph_def_of(concrete_function, own_names=None):
    """(GraphDef, names of the result ops); placeholders of captured variables say which these are.

    ``own_names``: of some variables, by the id of their handles; others have TensorFlow's names.
    """
    graph = concrete_function.graph
    graph_def = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    # graph.variables raises when one of them has been deleted since the trace.
    living = [variable for ref in graph._weak_variables if (variable := ref()) is not None]
    by_handle = {id(variable.handle): variable for variable in living}
    captured = [
        (internal, by_handle.get(id(external)))
        for external, internal in graph.captures
        if internal.dtype.name == "resource" and internal.op.name in nodes
    ]
    known = own_names or {}
    names = numbered(
        [known.get(id(v.handle), v.name.partition(":")[0]) for _, v in captured if v is not None]
    )
    for internal, variable in captured:
        name = "" if variable is None else next(names)
        _describe_capture(nodes[internal.op.name], internal, variable, name)
    return graph_def, [tensor.op.name for tensor in concrete_function.outputs]


def numbered(names: Sequence[str]) -> Iterator[str]:
    """The names; ``_1``, ``_2``, ... is appended to those that were there before.

    Layers of a subclassed Keras model that are built when it is called have variables of the same names.
    """
    taken, seen = set(names), set()
    for name in names:
        free, number = name, 0
        while free in seen or (number and free in taken):
            number += 1
            free = f"{name}_{number}"
        seen.add(free)
        yield free


def _describe_capture(node, placeholder, variable, name) -> None:
    from tensorflow.python.ops import handle_data_util

    handle_data = handle_data_util.get_resource_handle_data(placeholder)
    for pointed in handle_data.shape_and_type if handle_data.is_set else ():
        node.attr[HANDLE_SHAPES].list.shape.add().CopyFrom(pointed.shape)
        node.attr["_handle_dtypes"].list.type.append(pointed.dtype)
    if variable is not None:
        described = {"name": name, "trainable": bool(variable.trainable)}
        node.attr[VARIABLE_ATTR].s = json.dumps(described).encode()


def func_graph_transforms() -> list[Callable[[Any], None]]:
    """The functions that TensorFlow calls with each ``FuncGraph`` it has traced."""
    from tensorflow.python.eager.polymorphic_function import transform

    transforms: list[Callable[[Any], None]] = transform.FUNC_GRAPH_TRANSFORMS
    return transforms


def set_string_attr(op: tf.Operation, name: str, value: str) -> None:
    """Sets an attribute of an op that is in a graph already."""
    from tensorflow.core.framework import attr_value_pb2

    op._set_attr(name, attr_value_pb2.AttrValue(s=value.encode()))
