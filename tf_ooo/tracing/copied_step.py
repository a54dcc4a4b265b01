"""A step that is traced once, and copied into functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from grappler_passes.compat import graph_protos
from tf_ooo.compat import func_graphs
from tf_ooo.tracing.flat import FlatTrace


class CopiedStep:
    """A training step that is traced once and copied into other functions as often as wanted.

    All names of a copy stand below one scope, as those of an inlined ``tf.function`` do: graph optimizers
    sort the summands of a sum by name, so that any other way of naming changes bits.
    """

    def __init__(self, step: Callable[[Any], Any], element_spec: Any) -> None:
        self._trace = FlatTrace(step, [element_spec])
        graph = self._trace.concrete.graph
        given = {tensor.op.name for tensor in graph.inputs}
        graph_def = graph.as_graph_def()
        self._graph_def = graph_protos.with_nodes(
            graph_def, (node for node in graph_def.node if node.name not in given)
        )
        for node in self._graph_def.node:
            graph_protos.keep_colocations(node, lambda name: name not in given)

    @property
    def nodes(self) -> int:
        """How many ops a copy adds."""
        return len(self._graph_def.node)

    @property
    def op_types(self) -> set[str]:
        """Of the step and of all functions that it calls."""
        called = {node.op for function in self._graph_def.library.function for node in function.node_def}
        return called | {node.op for node in self._graph_def.node}

    @property
    def called_op_types(self) -> set[str]:
        """Of the functions that the step calls."""
        return {node.op for function in self._graph_def.library.function for node in function.node_def}

    def __call__(
        self, batch: Any, scope: str, attributes: dict[str, int], edit: Callable[[Any], None] | None = None
    ) -> Any:
        """A copy of the step in the function that is being traced; what the step returns.

        ``scope`` is new in that function; all nodes get ``attributes``; ``edit`` changes the copy's GraphDef
        before.
        """
        graph_def = graph_protos.copy_of(self._graph_def)
        for node in graph_def.node:
            for key, value in attributes.items():
                node.attr[key].i = value
        if edit is not None:
            edit(graph_def)
        copied = tf.graph_util.import_graph_def(
            graph_def, self._inputs(batch), list(self._trace.fetches), name=scope
        )
        return self._trace.unpack(copied)

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """What takes the place of the step's inputs: the batch, variables as this function captures them."""
        inner = self._trace.concrete.graph
        captured = func_graphs.captured_here(self._trace.concrete)
        given = map(tf.convert_to_tensor, tf.nest.flatten(batch, expand_composites=True))
        pairs = zip(inner.inputs, [*given, *captured], strict=True)
        read = {text for node in self._graph_def.node for text in node.input}
        read |= {tensor.name.removesuffix(":0") for tensor in inner.outputs}
        return {
            tensor.name: value for tensor, value in pairs if tensor.op.name in read or tensor.name in read
        }
