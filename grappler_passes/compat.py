"""All TensorFlow private API of this package, each with a test that says what broke.

Seen working on TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grappler_passes.errors import GraphError

HANDLE_SHAPES = "_handle_shapes"


@dataclass(frozen=True)
class OutputInfo:
    """dtype name (``float32``), shape (None: unknown rank; None in it: unknown size), bytes of an element."""

    dtype: str
    shape: tuple[int | None, ...] | None
    element_bytes: int

    @property
    def is_number(self) -> bool:
        """Neither a handle nor a variant nor a string, so rank 0 means one number (bool included)."""
        return self.dtype not in ("resource", "variant", "string")


@contextlib.contextmanager
def graph_errors() -> Iterator[None]:
    """Turns what TensorFlow says of a graph that it cannot read into a GraphError."""
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, ValueError) as error:
        raise GraphError(f"TensorFlow cannot read the graph: {str(error).splitlines()[0]}") from error


class InferredOutputs(Mapping[str, "tuple[OutputInfo, ...]"]):
    """The outputs of each op of a graph; each is looked up when it is asked for, which takes a while."""

    def __init__(self, ops) -> None:
        self._ops = {op.name: op for op in ops}
        self._known: dict[str, tuple[OutputInfo, ...]] = {}

    def __getitem__(self, name: str) -> tuple[OutputInfo, ...]:
        if name not in self._known:
            self._known[name] = tuple(map(info_of, self._ops[name].outputs))
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def constant(self, name: str, port: int) -> Any:
        """The value, as an array, of a tensor that follows from constants and static shapes; else None."""
        from tensorflow.python.framework import tensor_util

        return tensor_util.try_evaluate_constant(self._ops[name].outputs[port])


def infer_outputs(graph_def) -> dict[str, tuple[OutputInfo, ...]]:
    """Shapes and dtypes of all outputs, by TensorFlow's own shape functions."""
    return dict(infer_some_outputs(graph_def))


def infer_some_outputs(graph_def) -> InferredOutputs:
    """As :func:`infer_outputs`, for callers that look at a part of them.

    Goes below ``tf.import_graph_def`` because that takes three times as long: 3.2 s against
    1.1 s on DenseNet121's 18,904 nodes.
    """
    import tensorflow as tf
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.framework import c_api_util, ops

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
    # Not _add_new_tf_operations, which also looks at each op's inputs, devices and attributes: 0.3 s.
    made = [ops.Operation._from_c_op(c_op=c_op, g=graph) for c_op in graph.new_operations()]
    return InferredOutputs(made)


def _without_library(graph_def):
    """Functions tell shape inference nothing about a PartitionedCall, and those that Grappler leaves
    behind may be inconsistent; only ops that are functions by name need theirs."""
    functions = {function.signature.name for function in graph_def.library.function}
    if not functions or any(node.op in functions for node in graph_def.node):
        return graph_def
    out = type(graph_def)(versions=graph_def.versions)
    out.node.extend(graph_def.node)
    return out


# What is fused, the op alone, and how many of the inputs are its own.
_FUSED_NORMS = {
    "_FusedBatchNormEx": ("FusedBatchNormV3", 5),
    "_FusedBatchNormGradEx": ("FusedBatchNormGradV3", 6),
}


def _readable(graph_def):
    """Graphs of TensorFlow 2.15 and 2.18 that it runs itself, but does not import as they are.

    It fuses a batch normalization with its Relu on CPUs for any number of channels, while the shape
    function asks for a multiple of 4; the outputs are those of the op alone.  Its ``_Arg`` has a ``shape``
    that the op's definition lacks.
    """

    def is_odd(node) -> bool:
        return node.op in _FUSED_NORMS or (node.op == "_Arg" and "shape" in node.attr)

    if not any(map(is_odd, graph_def.node)):
        return graph_def
    out = type(graph_def)()
    out.CopyFrom(graph_def)
    for node in filter(is_odd, out.node):
        if node.op == "_Arg":
            del node.attr["shape"]
        elif not node.attr["num_side_inputs"].i:
            _unfuse(node)
    return out


def _unfuse(node) -> None:
    node.op, count = _FUSED_NORMS[node.op]
    data = [name for name in node.input if not name.startswith("^")]
    del node.input[:]
    node.input.extend(data[:count])
    for name in ("num_side_inputs", "activation_mode"):
        node.attr.pop(name, None)


def _with_handle_shapes(graph_def):
    """Only ``_Arg`` tells shape inference what a variable's handle points to; Placeholder does not."""
    known = [n for n in graph_def.node if n.op == "Placeholder" and HANDLE_SHAPES in n.attr]
    if not known:
        return graph_def
    out = type(graph_def)()
    out.CopyFrom(graph_def)
    for index, node in enumerate(n for n in out.node if n.op == "Placeholder" and HANDLE_SHAPES in n.attr):
        dtype = node.attr.pop("dtype").type
        node.attr.pop("shape", None)
        node.op = "_Arg"
        node.attr["T"].type = dtype
        node.attr["index"].i = index
    return out


def graph_def_of(concrete_function):
    """(GraphDef, names of the result ops) of a ConcreteFunction.

    The GraphDef alone does not say which variable a captured handle is; the placeholders get the
    attributes that TensorFlow itself puts on function arguments, and ``_ooo_variable``.
    """
    graph = concrete_function.graph
    graph_def = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    by_handle = {id(variable.handle): variable for variable in _living_variables(graph)}
    for external, internal in graph.captures:
        if internal.dtype.name == "resource" and internal.op.name in nodes:
            _describe_capture(nodes[internal.op.name], internal, by_handle.get(id(external)))
    return graph_def, [tensor.op.name for tensor in concrete_function.outputs]


def _living_variables(graph) -> list[Any]:
    """``graph.variables`` raises when one of them has been deleted since the trace."""
    return [variable for ref in graph._weak_variables if (variable := ref()) is not None]


def _describe_capture(node, placeholder, variable) -> None:
    from tensorflow.python.ops import handle_data_util

    handle_data = handle_data_util.get_resource_handle_data(placeholder)
    for pointed in handle_data.shape_and_type if handle_data.is_set else ():
        node.attr[HANDLE_SHAPES].list.shape.add().CopyFrom(pointed.shape)
        node.attr["_handle_dtypes"].list.type.append(pointed.dtype)
    if variable is not None:
        described = {"name": variable.name.partition(":")[0], "trainable": bool(variable.trainable)}
        node.attr["_ooo_variable"].s = json.dumps(described).encode()


def info_of(tensor) -> OutputInfo:
    """What is known of a tensor of a graph."""
    shape = tensor.shape
    dims = None if shape.rank is None else tuple(shape.as_list())
    dtype = tensor.dtype.base_dtype
    return OutputInfo(dtype.name, dims, dtype.size)


def _op_def(op_type: str) -> Any:
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(op_type)


def is_known_op(op_type: str) -> bool:
    """Whether an op of this type is registered; libraries such as Horovod register theirs when loaded."""
    return _op_def(op_type) is not None


def is_stateful(op_type: str) -> bool:
    """Whether TensorFlow registered the op type as having state or side effects; True if unknown."""
    op_def = _op_def(op_type)
    return op_def is None or op_def.is_stateful


def has_reference_inputs(op_type: str) -> bool:
    """Whether the op may change a reference variable that it is given; control flow only hands it on."""
    op_def = _op_def(op_type)
    return (
        op_def is not None
        and not op_type.startswith("Ref")
        and any(argument.is_ref for argument in op_def.input_arg)
    )


@lru_cache(maxsize=4096)
def resource_inputs(op_type: str) -> tuple[int, ...]:
    """The places of the inputs that are handles; those behind an input of variable length are left out."""
    from tensorflow.core.framework import types_pb2

    found: list[int] = []
    for place, argument in enumerate(op_def.input_arg if (op_def := _op_def(op_type)) else ()):
        if argument.number_attr or argument.type_list_attr:
            break
        if argument.type == types_pb2.DT_RESOURCE:
            found.append(place)
    return tuple(found)


def inline_graph_def(graph_def, fetches: list[str]):
    """A flat copy of ``graph_def``: function calls inlined, While and If lowered to Switch and Merge.

    Runs Grappler's function optimizer alone, as TensorFlow itself does for TFLite and TensorRT.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
    from tensorflow.python.grappler import tf_optimizer

    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(_without_implementations(graph_def), name="")
        meta_graph = tf.compat.v1.train.export_meta_graph(graph=graph)
    collection = meta_graph_pb2.CollectionDef()
    collection.node_list.value.extend(fetches)
    meta_graph.collection_def["train_op"].CopyFrom(collection)
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    options.optimizers.append("function")
    options.function_optimization = options.AGGRESSIVE
    return tf_optimizer.OptimizeGraph(config, meta_graph)


def _without_implementations(graph_def):
    """Drops ``api_implements``: it would keep the calls that have a cuDNN twin from being inlined."""
    out = type(graph_def)()
    out.CopyFrom(graph_def)
    for function in out.library.function:
        function.attr.pop("api_implements", None)
    _drop_unused_functions(out)
    _drop_lost_colocations(out)
    return out


def _drop_unused_functions(graph_def) -> None:
    """Those that Grappler leaves behind may be inconsistent, and then nothing can be imported."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    used: set[str] = set()
    todo = _called_by(graph_def.node)
    while todo:
        name = todo.pop()
        if name in functions and name not in used:
            used.add(name)
            todo |= _called_by(functions[name].node_def)
    kept = [function for name, function in functions.items() if name in used]
    del graph_def.library.function[:]
    graph_def.library.function.extend(kept)
    gradients = [g for g in graph_def.library.gradient if g.function_name in used and g.gradient_func in used]
    del graph_def.library.gradient[:]
    graph_def.library.gradient.extend(gradients)


def _called_by(nodes) -> set[str]:
    """Names of functions that nodes call: by their type, or in an attribute."""
    values = [value for node in nodes for value in node.attr.values()]
    named = {value.func.name for value in values if value.HasField("func")}
    listed = {function.name for value in values for function in value.list.func}
    return {node.op for node in nodes} | named | listed


def _drop_lost_colocations(graph_def) -> None:
    """Grappler leaves colocation with nodes that it has removed; ``tf.import_graph_def`` refuses it."""
    names = {node.name for node in graph_def.node}
    for node in graph_def.node:
        groups = node.attr["_class"].list.s if "_class" in node.attr else ()
        kept = [group for group in groups if group.decode().removeprefix("loc:@") in names]
        if len(kept) < len(groups):
            del node.attr["_class"].list.s[:]
            node.attr["_class"].list.s.extend(kept)
            if not kept:
                del node.attr["_class"]
