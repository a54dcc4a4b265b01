"""Tells whether two traces of a step are of the same graph: Python may have changed between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_ooo.compat.tf_functions import functions_of

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2, graph_pb2

# A rewrite is asked for by these, in the second trace only.
_MARKS = "_ooo_"
# Numbers that TensorFlow gives anew in each trace.
_NUMBERED = ("_gradient_op_type", "_user_specified_name")


def differ(step: Callable[..., Any], other: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether two steps' traces for these arguments compute different things; makes missing traces.

    Names of ops and functions do not count.  False where a step is no ``tf.function``, or cannot be traced.
    """
    functions = [functions_of(each)[:1] for each in (step, other)]
    if not all(functions):
        return False
    try:
        traced, again = (function.get_concrete_function(*args, **kwargs) for (function,) in functions)
    except Exception:  # of the user's code: the call that follows raises it
        return False
    captured = traced.captured_inputs, again.captured_inputs
    if len(captured[0]) != len(captured[1]) or not all(map(_same_tensor, *captured)):
        return True
    return _content_of(traced.graph.as_graph_def()) != _content_of(again.graph.as_graph_def())


def _same_tensor(tensor: tf.Tensor, other: Any) -> bool:
    """A variable's handle is one object; constants are made anew, and compared."""
    if tensor is other:
        return True
    if tensor.dtype != other.dtype or not tensor.dtype.is_numpy_compatible:
        return False
    return hasattr(tensor, "numpy") and np.array_equal(tensor.numpy(), other.numpy())


def _content_of(graph_def: graph_pb2.GraphDef) -> Hashable:
    """Return equal for graphs that differ in names alone."""
    contents = _Contents(graph_def)
    return contents.of_nodes(graph_def.node, ())


class _Contents:
    """Reads functions of one graph by their names; those that two nodes call are read once."""

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self._functions = {function.signature.name: function for function in graph_def.library.function}
        self._known: dict[str, int] = {}

    def of_nodes(self, nodes: Iterable[Any], inputs: Iterable[str], returned: Iterable[str] = ()) -> Hashable:
        nodes = list(nodes)
        names = [*inputs, *(node.name for node in nodes)]
        index = {name: number for number, name in enumerate(names)}

        def place(tensor: str) -> Hashable:
            control = tensor.startswith("^")
            name, _, output = tensor.removeprefix("^").partition(":")
            return control, index.get(name, -1), output

        rows = [
            (node.op, node.device, tuple(map(place, node.input)), self._of_attributes(node.attr))
            for node in nodes
        ]
        return tuple(rows), tuple(map(place, returned))

    def _of_attributes(self, attributes: Any) -> Hashable:
        kept = sorted(n for n in attributes if n not in _NUMBERED and not n.startswith(_MARKS))
        return tuple((name, self._of_value(attributes[name])) for name in kept)

    def _of_value(self, value: attr_value_pb2.AttrValue) -> Hashable:
        if value.HasField("func"):
            return self._of_function(value.func.name), self._of_attributes(value.func.attr)
        if value.HasField("list") and value.list.func:
            return tuple(self._of_function(function.name) for function in value.list.func)
        return bytes(value.SerializeToString(deterministic=True))

    def _of_function(self, name: str) -> Hashable:
        function = self._functions.get(name)
        if function is None:
            return name
        if name not in self._known:
            self._known[name] = 0  # a function that calls itself
            inputs = [argument.name for argument in function.signature.input_arg]
            returned = [function.ret[argument.name] for argument in function.signature.output_arg]
            self._known[name] = hash(self.of_nodes(function.node_def, inputs, returned))
        return self._known[name]
