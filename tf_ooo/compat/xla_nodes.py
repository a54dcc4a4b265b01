"""The ops that put a function on a stream and keep order in HLO."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from grappler_passes.compat import releases

# Earlier ones inline the call, or know no custom call to a TensorFlow function.
OLDEST_TENSORFLOW = (2, 21)
MODULE_VERSION = 9
STREAM_ATTRIBUTE = "_xla_stream_annotation"
_FRONTEND = "_XlaFrontendAttributes"
_OPS = "tensorflow.compiler.tf2xla.ops.gen_xla_ops"
_numbers = itertools.count(1)

MLIR_TYPES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "ui8",
    "uint16": "ui16", "uint32": "ui32", "uint64": "ui64", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64", "complex64": "complex<f32>", "complex128": "complex<f64>",
}  # fmt: skip


def why_no_streams() -> str | None:
    """Say why this TensorFlow cannot call a function on a stream; None where it can."""
    if releases.major_minor(tf.__version__) < OLDEST_TENSORFLOW:
        return (
            f"TensorFlow {tf.__version__}: its XLA inlines calls that are to run on a stream; 2.21 is needed"
        )
    try:
        module = importlib.import_module(_OPS)
        importlib.import_module("tensorflow.compiler.xla.xla_data_pb2")
    except ImportError as error:
        return f"TensorFlow {tf.__version__}: {error}"
    missing = [name for name in ("xla_call_module", "xla_optimization_barrier") if not hasattr(module, name)]
    return f"TensorFlow {tf.__version__} has no {missing[0]}" if missing else None


def platform() -> str:
    """``CUDA``, ``ROCM``, ``CPU`` or another GPU: what XLA compiles for where no device is named."""
    if not tf.config.list_logical_devices("GPU"):
        return "CPU"
    if tf.test.is_built_with_rocm():
        return "ROCM"
    return "CUDA" if tf.test.is_built_with_cuda() else "a GPU plug-in without CUDA"


def device_name() -> str:
    """Return the first GPU's, or ``CPU``."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU"
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))


def frontend_attributes(stream: int) -> bytes:
    """The value of the node attribute that puts a call on a stream and keeps it from being inlined."""
    from tensorflow.compiler.xla import xla_data_pb2

    marks = {STREAM_ATTRIBUTE: str(stream), "inlineable": "false"}
    serialized: bytes = xla_data_pb2.FrontendAttributes(map=marks).SerializeToString(deterministic=True)
    return serialized


def unique_name(prefix: str) -> str:
    """Return a function name that nothing else in this process has."""
    return f"{prefix}_{next(_numbers)}"


def function_def(
    name: str, nodes: object, inputs: Sequence[tuple[str, Any, Any]], outputs: Sequence[str]
) -> Any:
    """Return a FunctionDef of ``nodes``, a GraphDef that reads the inputs by name.

    ``inputs``: (name of the node that stands for it, dtype name, shape); ``outputs``: ``node:port``.
    """
    from tensorflow.python.framework import graph_to_function_def

    graph = tf.Graph()
    with graph.as_default():
        for node, dtype, shape in inputs:
            tf.compat.v1.placeholder(tf.as_dtype(dtype), shape, name=node)
        arguments = [graph.get_tensor_by_name(f"{node}:0") for node, _, _ in inputs]
        replaced = {tensor.name: tensor for tensor in arguments}
        tf.import_graph_def(nodes, input_map=replaced, name="")
        results = [graph.get_tensor_by_name(text) for text in outputs]
    placeholders = {tensor.op for tensor in arguments}
    body = [op for op in graph.get_operations() if op not in placeholders]
    function_def = graph_to_function_def.graph_to_function_def(graph, body, arguments, results)
    function_def.signature.name = name
    return function_def


def call_node(name: str, stream: int, function: str, module: str, inputs: Sequence[str], types: Any) -> Any:
    """Return the NodeDef of an ``XlaCallModule``; ``types`` are (input infos, output infos)."""
    given, results = types
    node = node_def_pb2.NodeDef(name=name, op="XlaCallModule", input=inputs)
    node.attr["version"].i = MODULE_VERSION
    node.attr["module"].s = module.encode()
    node.attr["Tin"].list.type.extend(tf.as_dtype(info.dtype).as_datatype_enum for info in given)
    node.attr["Tout"].list.type.extend(tf.as_dtype(info.dtype).as_datatype_enum for info in results)
    node.attr["Sout"].list.shape.extend(tf.TensorShape(info.shape).as_proto() for info in results)
    node.attr["platforms"].list.s.append(b"CUDA")
    node.attr["disabled_checks"].list.s.append(b"platform")
    node.attr["function_list"].list.func.add().name = function
    node.attr[_FRONTEND].s = frontend_attributes(stream)
    return node


def plain_call_node(name: str, function: str, inputs: Sequence[str], types: Any) -> Any:
    """Return the NodeDef of a call that XLA inlines; ``types`` are (input infos, output infos)."""
    node = node_def_pb2.NodeDef(name=name, op="PartitionedCall", input=inputs)
    for attribute, infos in zip(("Tin", "Tout"), types, strict=True):
        node.attr[attribute].list.type.extend(tf.as_dtype(info.dtype).as_datatype_enum for info in infos)
    node.attr["f"].func.name = function
    return node


def barrier_node(name: str, inputs: Sequence[str], dtypes: Sequence[str]) -> Any:
    """Return the NodeDef of an ``XlaOptimizationBarrier``: its outputs are its inputs, once all are there."""
    node = node_def_pb2.NodeDef(name=name, op="XlaOptimizationBarrier", input=inputs)
    node.attr["T"].list.type.extend(tf.as_dtype(dtype).as_datatype_enum for dtype in dtypes)
    return node


def constant_node(name: str, value: np.ndarray[Any, Any]) -> Any:
    """Return the NodeDef of a constant."""
    node = node_def_pb2.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node


def barrier(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors once all of them are there."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return list(gen_xla_ops.xla_optimization_barrier(input=list(tensors)))
