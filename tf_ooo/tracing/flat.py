"""A function traced once to a graph of tensors in and tensors out, to be put into other functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat import traced_functions
from tf_ooo.compat import func_graphs, nests, tf_functions
from tf_ooo.compat.nests import Packed


class FlatTrace:
    """The trace of a function whose results are taken apart into their tensors.

    ``specs``: of each argument, which may be a nest.  ``fetches``: the results' tensors, ``node:port``, or a
    constant: Grappler wants to be asked for something.  Raises whatever tracing raises.
    """

    def __init__(self, function: Callable[..., Any], specs: Sequence[Any], compiled: bool = False) -> None:
        packed: list[Packed] = []

        def flat(*tensors: Any) -> list[Any]:
            packed.append(Packed(nests.as_tensors(function(*tensors))))
            return packed[-1].tensors or [tf.constant(0.0)]

        self.specs = tuple(specs)
        self.concrete = tf_functions.concrete_function(flat, specs, compiled=compiled)
        self.results = packed[-1]
        self.fetches = tuple(tensor.name for tensor in self.concrete.outputs)

    def graph_def(self) -> graph_pb2.GraphDef:
        """Return the graph, whose placeholders say which variables they are."""
        graph_def: graph_pb2.GraphDef = traced_functions.graph_def_of(self.concrete)[0]
        return graph_def

    @property
    def captures(self) -> list[tuple[Any, Any]]:
        """(tensor outside, placeholder inside).  BackendError for what only a call could tell."""
        return func_graphs.captures_of(self.concrete)

    @property
    def captured(self) -> dict[str, Any]:
        """Tensors outside by the names of the placeholders that stand for them; raises as ``captures``."""
        return {placeholder.op.name: outside for outside, placeholder in self.captures}

    @property
    def arguments(self) -> tuple[str, ...]:
        inside = {id(placeholder) for _, placeholder in self.captures}
        return tuple(tensor.op.name for tensor in self.concrete.inputs if id(tensor) not in inside)

    def unpack(self, fetched: Sequence[Any]) -> Any:
        return self.results.unpack(fetched[: len(self.results.tensors)])
