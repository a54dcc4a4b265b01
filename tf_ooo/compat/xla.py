"""Handles XLA: flags for one compilation, ops that put a function on a stream, compiled functions, HLO."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import releases
from tf_ooo.compat import func_graphs, tf_functions
from tf_ooo.errors import BackendError

# These set XLA's flags for one compilation, in a process that has compiled before. XLA reads ``XLA_FLAGS`` at
# its first use, but TensorFlow exports XLA's functions that read it again.

_VARIABLE = "XLA_FLAGS"
# They are xla::ResetFlagValues() and xla::ParseDebugOptionFlagsFromEnv(bool reset_envvar), without C++ types.
_RESET, _PARSE = "_ZN3xla15ResetFlagValuesEv", "_ZN3xla28ParseDebugOptionFlagsFromEnvEb"
# CUDA wheels have them in the first library, tensorflow-cpu in the second.
_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
_lock = threading.RLock()


def why_flags_are_fixed() -> str | None:
    """Say why this process cannot change XLA's flags any more; None if it can."""
    why = "this TensorFlow does not export what sets XLA's flags again; XLA read XLA_FLAGS at its start"
    return why if _library() is None else None


def flags_of_process() -> str:
    """Return the value of ``XLA_FLAGS``."""
    return os.environ.get(_VARIABLE, "")


@contextmanager
def added(flags: Sequence[str]) -> Iterator[None]:
    """Add flags to the process' own for everything that any thread compiles inside the block.

    XLA ends the process at an unknown flag: give only flags that TensorFlow 2.21 has. Raises BackendError if
    flags cannot be changed.
    """
    library = _library()
    if library is None:
        raise BackendError(f"{' '.join(flags)}: {why_flags_are_fixed()}")
    with _lock:
        before = os.environ.get(_VARIABLE)
        try:
            _set(library, " ".join(filter(None, (before, *flags))))
            yield
        finally:
            _set(library, before)


def _set(library: ctypes.CDLL, text: str | None) -> None:
    if text is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = text
    library[_RESET]()
    library[_PARSE](True)


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            library[_RESET].restype = library[_PARSE].restype = None
            library[_PARSE].argtypes = [ctypes.c_bool]
        except (OSError, AttributeError):
            continue
        return library
    return None


# Earlier versions inline the call, or know no custom call to a TensorFlow function.
OLDEST_TENSORFLOW = (2, 21)
MODULE_VERSION = 9
STREAM_ATTRIBUTE = "_xla_stream_annotation"
_FRONTEND = "_XlaFrontendAttributes"
_OPS = "tensorflow.compiler.tf2xla.ops.gen_xla_ops"

MLIR_TYPES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "ui8",
    "uint16": "ui16", "uint32": "ui32", "uint64": "ui64", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64", "complex64": "complex<f32>", "complex128": "complex<f64>",
}  # fmt: skip


def why_no_streams() -> str | None:
    """Say why this TensorFlow cannot call a function on a stream; None if it can."""
    ours = f"TensorFlow {tf.__version__}"
    if releases.major_minor(tf.__version__) < OLDEST_TENSORFLOW:
        return f"{ours}: its XLA inlines calls that are to run on a stream; 2.21 is needed"
    try:
        module = importlib.import_module(_OPS)
        importlib.import_module("tensorflow.compiler.xla.xla_data_pb2")
    except ImportError as error:
        return f"{ours}: {error}"
    missing = [name for name in ("xla_call_module", "xla_optimization_barrier") if not hasattr(module, name)]
    return f"{ours} has no {missing[0]}" if missing else None


def platform() -> str:
    """Return ``CUDA``, ``ROCM``, ``CPU`` or another GPU: XLA compiles for it if no device is named."""
    if not tf.config.list_logical_devices("GPU"):
        return "CPU"
    if tf.test.is_built_with_rocm():
        return "ROCM"
    return "CUDA" if tf.test.is_built_with_cuda() else "a GPU plug-in without CUDA"


def device_name() -> str:
    """Return the first GPU's name, or ``CPU``."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU"
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))


def frontend_attributes(stream: int) -> bytes:
    """Return the value of the node attribute that puts a call on a stream and keeps it from being inlined."""
    from tensorflow.compiler.xla import xla_data_pb2

    marks = {STREAM_ATTRIBUTE: str(stream), "inlineable": "false"}
    serialized: bytes = xla_data_pb2.FrontendAttributes(map=marks).SerializeToString(deterministic=True)
    return serialized


def call_node(name: str, stream: int, function: str, module: str, inputs: Sequence[str], types: Any) -> Any:
    """Return the NodeDef of an ``XlaCallModule``; ``types`` are (input infos, output infos)."""
    node = _call_node(name, "XlaCallModule", inputs, types)
    node.attr["version"].i = MODULE_VERSION
    node.attr["module"].s = module.encode()
    node.attr["Sout"].list.shape.extend(tf.TensorShape(info.shape).as_proto() for info in types[1])
    node.attr["platforms"].list.s.append(b"CUDA")
    node.attr["disabled_checks"].list.s.append(b"platform")
    node.attr["function_list"].list.func.add().name = function
    node.attr[_FRONTEND].s = frontend_attributes(stream)
    return node


def plain_call_node(name: str, function: str, inputs: Sequence[str], types: Any) -> Any:
    """Return the NodeDef of a call that XLA inlines; ``types`` are (input infos, output infos)."""
    node = _call_node(name, "PartitionedCall", inputs, types)
    node.attr["f"].func.name = function
    return node


def _call_node(name: str, op: str, inputs: Sequence[str], types: Any) -> Any:
    node = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
    for attribute, infos in zip(("Tin", "Tout"), types, strict=True):
        node.attr[attribute].list.type.extend(tf.as_dtype(info.dtype).as_datatype_enum for info in infos)
    return node


def barrier_node(name: str, inputs: Sequence[str], dtypes: Sequence[str]) -> Any:
    """Return the NodeDef of an ``XlaOptimizationBarrier``: it outputs its inputs once all are there."""
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


def repeated_function(
    graph_def: graph_pb2.GraphDef, inputs: Mapping[str, Any], fetches: Sequence[str], times: int
) -> Callable[..., Any]:
    """Return a compiled function of the inputs that computes the fetches ``times`` times in a row.

    The number is a constant, so that XLA:GPU need not ask whether to go on.  A round's inputs come out of a
    barrier with the results of the round before, so that no round can be left out or moved out of the loop.
    ``graph_def`` is flat; its placeholders stand for the ``inputs``, TensorSpecs by ``node:port``;
    ``fetches`` are floats of static shape.
    """
    body = func_graphs.without_placeholders(graph_def)

    def once(tensors: Sequence[Any]) -> list[Any]:
        return func_graphs.import_here(body, dict(zip(inputs, tensors, strict=True)), list(fetches))

    def run(*arguments: Any) -> list[Any]:
        def again(number: Any, tensors: list[Any], results: list[Any]) -> tuple[Any, list[Any], list[Any]]:
            inside = barrier([*tensors, *results])[: len(tensors)]
            casted = [tf.cast(new, old.dtype) for new, old in zip(once(inside), results, strict=True)]
            return number + 1, inside, casted

        state = (tf.constant(1), list(arguments), once(arguments))
        return list(tf.while_loop(lambda number, *_: number < times, again, state)[2])

    function: Callable[..., Any] = tf_functions.plain_function(run, list(inputs.values()), compiled=True)
    return function


def hlo_of(function: Any, specs: Sequence[Any], stage: str = "hlo") -> str:
    """Return the HLO text of a compiled function before (``hlo``) or after (``optimized_hlo``) XLA's passes.

    The device is named, although TensorFlow warns of that: otherwise TensorFlow draws a random number, and
    the user's numbers change.
    """
    with tf.init_scope():
        device = tf.identity(tf.constant(0.0)).device
    ask = function.experimental_get_compiler_ir(*specs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text: str = ask(stage=stage, device_name=device)
    return text


def stream_calls(hlo: str) -> list[int]:
    """Return the stream of each annotated call in an HLO text."""
    return [int(stream) for stream in re.findall(rf'= .* call\(.*{STREAM_ATTRIBUTE}="(\d+)"', hlo)]
