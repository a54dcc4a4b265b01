"""TensorFlow's private API of the data parallel mode, each with a test in tests/graph/test_step_copies.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tf_ooo import compat

# On the communications of a gradient that travels in slices: which of them.
PART_ATTR = "_ooo_part"


@contextlib.contextmanager
def numbered_part(number: int) -> Iterator[None]:
    """Ops made inside say which slice they belong to; of no use where ops run at once."""
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    if tf.executing_eagerly():
        yield
        return
    with tf.compat.v1.get_default_graph()._attr_scope({PART_ATTR: attr_value_pb2.AttrValue(i=number)}):
        yield


class CopiedStep:
    """A training step that is traced once and copied into other functions as often as wanted.

    All names of a copy stand below one scope, as those of an inlined ``tf.function`` do: TensorFlow's graph
    optimizers sort the summands of a sum by name, so that any other way of naming changes bits.

    Args:
        step: called with a batch; its variables have been made.
        element_spec: of a batch.
    """

    def __init__(self, step: Callable[[Any], Any], element_spec: Any) -> None:
        self._concrete = compat.traced_once(step, [element_spec]).get_concrete_function()
        graph = self._concrete.graph
        given = {tensor.op.name for tensor in graph.inputs}
        self._graph_def = graph.as_graph_def()
        nodes = [node for node in self._graph_def.node if node.name not in given]
        del self._graph_def.node[:]
        for node in nodes:
            _leave_out_places(node, given)
            self._graph_def.node.append(node)

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

        Args:
            batch: of the step's element_spec.
            scope: of the copy's names; not used in the function before.
            attributes: of all its nodes.
            edit: changes the copy's GraphDef before it is added.
        """
        import tensorflow as tf
        from tensorflow.core.framework import graph_pb2

        graph_def = graph_pb2.GraphDef()
        graph_def.CopyFrom(self._graph_def)
        for node in graph_def.node:
            for key, value in attributes.items():
                node.attr[key].i = value
        if edit is not None:
            edit(graph_def)
        outputs = self._concrete.graph.outputs
        made = tf.graph_util.import_graph_def(
            graph_def, self._inputs(batch), [tensor.name for tensor in outputs], name=scope
        )
        return self._packed(made)

    def _inputs(self, batch: Any) -> dict[str, Any]:
        """What takes the place of the step's inputs: the batch, variables as this function captures them."""
        import tensorflow as tf

        outer, inner = tf.compat.v1.get_default_graph(), self._concrete.graph
        for variable in inner.variables:
            outer.watch_variable(variable)
        captured = [outer.capture(tensor) for tensor in self._concrete.captured_inputs]
        flat = [
            tf.convert_to_tensor(value) for value in tf.nest.flatten(batch, expand_composites=True)
        ] + captured
        pairs = zip(inner.inputs, flat, strict=True)
        read = {text for node in self._graph_def.node for text in node.input}
        read |= {tensor.name.removesuffix(":0") for tensor in inner.outputs}
        return {
            tensor.name: value for tensor, value in pairs if tensor.op.name in read or tensor.name in read
        }

    def _packed(self, flat: list[Any]) -> Any:
        import tensorflow as tf

        structure = self._concrete.structured_outputs
        left = iter(flat)
        values = [
            None if one is None else next(left) for one in tf.nest.flatten(structure, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(structure, values, expand_composites=True)


def _leave_out_places(node: Any, given: set[str]) -> None:
    """No wish to be where an input of the step is: the copy has no such node."""
    wishes = node.attr["_class"].list.s if "_class" in node.attr else ()
    kept = [wish for wish in wishes if wish.decode().removeprefix("loc:@") not in given]
    if len(kept) == len(wishes):
        return
    del node.attr["_class"]
    if kept:
        node.attr["_class"].list.s.extend(kept)
