"""Tells shapes and dtypes of a graph's tensors, by TensorFlow's own shape functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import graph_protos
from grappler_passes.compat.runtime import HANDLE_SHAPES
from grappler_passes.errors import GraphError

# Graph optimizers see a function's argument as an op of this type.
ARGUMENT = "_Arg"


@dataclass(frozen=True)
class OutputInfo:
    """Holds dtype name (``float32``), shape (None for unknown rank or size), and bytes per element."""

    dtype: str
    shape: tuple[int | None, ...] | None
    element_bytes: int

    @property
    def is_number(self) -> bool:
        """Say whether the output holds numbers, so that rank 0 means a single one; handles do not."""
        return self.dtype not in ("resource", "variant", "string")


@contextlib.contextmanager
def graph_errors() -> Iterator[None]:
    """Turn TensorFlow's errors about a graph that it cannot read into a GraphError."""
    try:
        yield
    except (tf.errors.OpError, ValueError) as error:
        raise GraphError(f"TensorFlow cannot read the graph: {str(error).splitlines()[0]}") from error


class InferredOutputs(Mapping[str, "tuple[OutputInfo, ...]"]):
    """Holds the outputs of each op of a graph; looks each up when asked for it, which takes a while."""

    def __init__(self, graph: tf.Graph) -> None:
        from tensorflow.python.client import pywrap_tf_session

        self._graph = graph
        self._c_ops = {pywrap_tf_session.TF_OperationName(c_op): c_op for c_op in graph.new_operations()}
        self._known: dict[str, tuple[OutputInfo, ...]] = {}

    def __getitem__(self, name: str) -> tuple[OutputInfo, ...]:
        if name not in self._known:
            self._known[name] = tuple(map(info_of, self._op(name).outputs))
        return self._known[name]

    def add(self, copies: Mapping[str, str]) -> None:
        """Give each copy the outputs of the op that it is a copy of."""
        self._c_ops.update((copy, self._c_ops[name]) for copy, name in copies.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._c_ops)

    def __len__(self) -> int:
        return len(self._c_ops)

    def _op(self, name: str) -> tf.Operation:
        """Return TensorFlow's own object; making one for each op takes a third of the time to read the graph.

        ``_add_new_tf_operations`` also looks at each op's inputs, devices and attributes: 0.3 s.
        """
        from tensorflow.python.framework import ops

        return ops.Operation._from_c_op(c_op=self._c_ops[name], g=self._graph)

    def constant(self, name: str, port: int) -> Any:
        """Return a tensor's value as an array if it follows from constants and static shapes; else None."""
        from tensorflow.python.framework import tensor_util

        return tensor_util.try_evaluate_constant(self._op(name).outputs[port])


def infer_outputs(graph_def: graph_pb2.GraphDef) -> dict[str, tuple[OutputInfo, ...]]:
    """Return shapes and dtypes of all outputs, by TensorFlow's own shape functions."""
    return dict(infer_some_outputs(graph_def))


def infer_some_outputs(graph_def: graph_pb2.GraphDef) -> InferredOutputs:
    """Infer as :func:`infer_outputs` does, for callers that look at only some of the outputs.

    ``tf.import_graph_def`` takes three times as long: 3.2 s against 1.1 s on DenseNet121's 18,904 nodes.
    """
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.framework import c_api_util

    graph = tf.Graph()
    options = pywrap_tf_session.TF_NewImportGraphDefOptions()
    # Grappler leaves colocation constraints on nodes that it has removed.
    pywrap_tf_session.TF_ImportGraphDefOptionsSetValidateColocationConstraints(options, False)
    serialized = _readable(_without_library(_with_handle_shapes(graph_def))).SerializeToString()
    try:
        with graph._c_graph.get() as c_graph, c_api_util.tf_buffer(serialized) as buffer:
            pywrap_tf_session.TF_GraphImportGraphDefWithResults(c_graph, buffer, options)
    finally:
        pywrap_tf_session.TF_DeleteImportGraphDefOptions(options)
    return InferredOutputs(graph)


def _without_library(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return the graph without functions that only calls use: shape inference learns nothing from them, and
    those that Grappler leaves behind may be inconsistent."""
    functions = {function.signature.name for function in graph_def.library.function}
    if not functions or any(node.op in functions for node in graph_def.node):
        return graph_def
    out = graph_protos.copy_of(graph_def)
    out.ClearField("library")
    return out


# Each fused op has its plain counterpart here, and how many of the inputs the counterpart takes.
_FUSED = {
    "_FusedBatchNormEx": ("FusedBatchNormV3", 5),
    "_FusedBatchNormGradEx": ("FusedBatchNormGradV3", 6),
    "_FusedConv2D": ("Conv2D", 2),
}


def _readable(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Return the graph in a form that TensorFlow imports; some that it runs itself it refuses. 2.15 and 2.18
    fuse a batch normalization with its Relu on CPUs for any number of channels, while the shape function asks
    for a multiple of 4, and give ``_Arg`` a ``shape`` that the op's definition lacks. All fuse bfloat16
    convolutions on CPUs, which the fused op's definition does not know. The plain op's outputs are the
    same."""

    def is_odd(node: node_def_pb2.NodeDef) -> bool:
        if node.op == ARGUMENT:
            return "shape" in node.attr
        return node.op in _FUSED and (
            node.op.startswith("_FusedBatchNorm") or not graph_protos.allows_types(node)
        )

    if not any(map(is_odd, graph_def.node)):
        return graph_def
    out = graph_protos.copy_of(graph_def)
    for node in filter(is_odd, out.node):
        if node.op == ARGUMENT:
            del node.attr["shape"]
        elif not node.attr["num_side_inputs"].i:
            _unfuse(node)
    return out


def _unfuse(node: node_def_pb2.NodeDef) -> None:
    node.op, count = _FUSED[node.op]
    node.input[:] = [name for name in node.input if not name.startswith("^")][:count]
    known = graph_protos.attribute_names(node.op)
    for name in list(node.attr):
        if not name.startswith("_") and name not in known:
            del node.attr[name]


def _with_handle_shapes(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Turn Placeholders of handles to ``_Arg``: only its shape function tells what they point to."""
    known = [n for n in graph_def.node if n.op == "Placeholder" and HANDLE_SHAPES in n.attr]
    if not known:
        return graph_def
    out = graph_protos.copy_of(graph_def)
    for index, node in enumerate(n for n in out.node if n.op == "Placeholder" and HANDLE_SHAPES in n.attr):
        dtype = node.attr.pop("dtype").type
        node.attr.pop("shape", None)
        node.op = ARGUMENT
        node.attr["T"].type = dtype
        node.attr["index"].i = index
    return out


def info_of(tensor: tf.Tensor) -> OutputInfo:
    """Return a tensor's dtype, shape and bytes per element, as far as they are known."""
    dims = None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
    return OutputInfo(tensor.dtype.base_dtype.name, dims, tensor.dtype.size)
