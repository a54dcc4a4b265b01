"""Functions of graphs that TensorFlow has optimized already, called as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat import graph_protos, runtime
from grappler_passes.compat.shape_inference import ARGUMENT

_ENDS = (ARGUMENT, "_Retval")


class OptimizedGraph:
    """A graph as graph optimizers get it, with ``_Arg`` and ``_Retval`` nodes, as a function.

    It is called without being optimized again.

    Args:
        graph_def: the graph; it may call no functions.
        concrete: the traced function that it was made of.
        captured: tensors in the place of those that ``concrete`` captures, in the same order.

    Raises ValueError where the graph lacks an op that the function has to run, or cannot be imported.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef, concrete: Any, captured: Sequence[Any]) -> None:
        inner = concrete.graph
        given = inner.inputs[: len(inner.inputs) - len(captured)]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
        kept = {node.name for node in graph_def.node}
        lacking = [op.name for op in inner.control_outputs if op.name not in kept]
        if lacking or graph_def.library.function:
            raise ValueError(f"it lacks {lacking[0]}" if lacking else "it calls functions")

        def body(*tensors: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            arguments = [*tensors, *map(graph.capture, captured)]
            returned = _imported(graph_def, arguments)
            graph.control_outputs.extend(
                map(graph.get_operation_by_name, (o.name for o in inner.control_outputs))
            )
            return returned

        self._function = tf.compat.v1.wrap_function(body, specs)

    def __call__(self, *tensors: Any) -> list[Any]:
        """Return the results, flat, for the arguments' tensors."""
        with runtime.calls_not_optimized():
            results: list[Any] = self._function(*tensors)
        return results


def _imported(graph_def: graph_pb2.GraphDef, arguments: Sequence[Any]) -> list[Any]:
    """Puts the graph between these arguments and what it returns, into the graph that is being made."""
    ends = {node.name: node for node in graph_def.node if node.op in _ENDS}
    inner = graph_protos.with_nodes(graph_def, (node for node in graph_def.node if node.name not in ends))
    for node in inner.node:
        graph_protos.keep_colocations(node, lambda name: False)  # all have their devices
        if any(text[0] == "^" and text[1:] in ends for text in node.input):  # arguments are there before
            node.input[:] = [text for text in node.input if text[0] != "^" or text[1:] not in ends]
    by_name = {
        f"{node.name}:0": arguments[node.attr["index"].i] for node in ends.values() if node.op == ARGUMENT
    }
    returned = sorted((n for n in ends.values() if n.op == "_Retval"), key=lambda node: node.attr["index"].i)
    wanted = [_tensor_name(node.input[0]) for node in returned]
    read = {_tensor_name(text) for node in inner.node for text in node.input if text[0] != "^"}
    fetched = [name for name in wanted if name not in by_name]
    imported = tf.graph_util.import_graph_def(
        inner, {name: tensor for name, tensor in by_name.items() if name in read}, fetched, name=""
    )
    tensors = by_name | dict(zip(fetched, imported, strict=True))
    return [_where_it_was(tensors[name], node.device) for name, node in zip(wanted, returned, strict=True)]


def _where_it_was(tensor: tf.Tensor, device: str) -> Any:
    """Return the tensor on the device where the function returned it."""
    if not device or tensor.op.device in ("", device):
        return tensor
    with tf.device(device):
        return tf.identity(tensor)


def _tensor_name(text: str) -> str:
    return text if ":" in text else f"{text}:0"
