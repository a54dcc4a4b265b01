"""Every private API and version check of the XLA mode, each with a test.

Seen working on TensorFlow 2.21: an ``XlaCallModule`` becomes an HLO ``call`` that keeps its frontend
attributes, which XLA:GPU turns into an asynchronous call on a stream of its own.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_ooo.errors import BackendError

# Earlier ones inline the call, or know no custom call to a TensorFlow function.
OLDEST_TENSORFLOW = (2, 21)
MODULE_VERSION = 9
STREAM_ATTRIBUTE = "_xla_stream_annotation"
_FRONTEND = "_XlaFrontendAttributes"
_LOWER = "_lower_using_switch_merge"
_OPS = "tensorflow.compiler.tf2xla.ops.gen_xla_ops"
_numbers = itertools.count(1)

MLIR_TYPES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "ui8",
    "uint16": "ui16", "uint32": "ui32", "uint64": "ui64", "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64", "complex64": "complex<f32>", "complex128": "complex<f64>",
}  # fmt: skip


def why_no_streams() -> str | None:
    """Why this TensorFlow cannot call a function on a stream; None where it can."""
    import tensorflow as tf

    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if version < OLDEST_TENSORFLOW:
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
    """``CUDA``, ``ROCM`` or ``CPU``: what XLA compiles for where no device is named."""
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return "CPU"
    return "ROCM" if tf.test.is_built_with_rocm() else "CUDA"


def frontend_attributes(stream: int) -> bytes:
    """The value of the node attribute that puts a call on a stream and keeps it from being inlined."""
    from tensorflow.compiler.xla import xla_data_pb2

    marks = {STREAM_ATTRIBUTE: str(stream), "inlineable": "false"}
    serialized: bytes = xla_data_pb2.FrontendAttributes(map=marks).SerializeToString(deterministic=True)
    return serialized


def unique_name(prefix: str) -> str:
    """A function name that nothing else in this process has."""
    return f"{prefix}_{next(_numbers)}"


def flat_trace(function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """The ConcreteFunction of ``function(*specs)``.  Raises whatever tracing raises.

    It is one that XLA would compile: loops are traced in another way for XLA.
    """
    import tensorflow as tf

    plain = tf.autograph.experimental.do_not_convert(function)
    made = tf.function(plain, autograph=False, jit_compile=True)
    made._omit_frequent_tracing_warning = True
    return made.get_concrete_function(*specs)


def captures_of(concrete: Any) -> list[tuple[Any, Any]]:
    """(tensor outside, placeholder inside).  Raises BackendError for what only a call could tell."""
    graph = concrete.graph
    if getattr(graph, "deferred_external_captures", None):
        raise BackendError("the step reads values that are only known when it is called (deferred captures)")
    return list(graph.captures)


def flat_graphs(graph_def: Any, fetches: list[str]) -> tuple[Any, Any]:
    """The graph without calls, once with loops as single ops and once with loops lowered.

    Ops outside of loops have the same names in both.
    """
    from grappler_passes.compat import inline_graph_def

    functional = type(graph_def)()
    functional.CopyFrom(graph_def)
    for nodes in (functional.node, *(f.node_def for f in functional.library.function)):
        for node in nodes:
            node.attr.pop(_LOWER, None)
    return inline_graph_def(functional, fetches), inline_graph_def(graph_def, fetches)


def function_def(
    name: str, nodes: Any, inputs: Sequence[tuple[str, Any, Any]], outputs: Sequence[str]
) -> Any:
    """A FunctionDef.

    Args:
        name: of the function.
        nodes: a GraphDef whose nodes read the ``inputs`` by name.
        inputs: (name of the node that stands for it, dtype name, shape).
        outputs: tensor names, ``node:port``.
    """
    import tensorflow as tf
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
    made = graph_to_function_def.graph_to_function_def(graph, body, arguments, results)
    made.signature.name = name
    return made


def call_node(name: str, stream: int, function: str, module: str, inputs: Sequence[str], types: Any) -> Any:
    """The NodeDef of an ``XlaCallModule``; ``types`` are (input infos, output infos)."""
    import tensorflow as tf
    from tensorflow.core.framework import node_def_pb2

    given, made = types
    node = node_def_pb2.NodeDef(name=name, op="XlaCallModule", input=inputs)
    node.attr["version"].i = MODULE_VERSION
    node.attr["module"].s = module.encode()
    node.attr["Tin"].list.type.extend(tf.as_dtype(info.dtype).as_datatype_enum for info in given)
    node.attr["Tout"].list.type.extend(tf.as_dtype(info.dtype).as_datatype_enum for info in made)
    node.attr["Sout"].list.shape.extend(tf.TensorShape(info.shape).as_proto() for info in made)
    node.attr["platforms"].list.s.append(b"CUDA")
    node.attr["disabled_checks"].list.s.append(b"platform")
    node.attr["function_list"].list.func.add().name = function
    node.attr[_FRONTEND].s = frontend_attributes(stream)
    return node


def barrier_node(name: str, inputs: Sequence[str], dtypes: Sequence[str]) -> Any:
    """The NodeDef of an ``XlaOptimizationBarrier``: its outputs are its inputs, once all are there."""
    import tensorflow as tf
    from tensorflow.core.framework import node_def_pb2

    node = node_def_pb2.NodeDef(name=name, op="XlaOptimizationBarrier", input=inputs)
    node.attr["T"].list.type.extend(tf.as_dtype(dtype).as_datatype_enum for dtype in dtypes)
    return node


def constant_node(name: str, value: np.ndarray[Any, Any]) -> Any:
    """The NodeDef of a constant."""
    import tensorflow as tf
    from tensorflow.core.framework import node_def_pb2

    node = node_def_pb2.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node


def register_functions(graph_def: Any, prefix: str) -> None:
    """Makes the library's functions whose names start so known to TensorFlow's runtime.

    It looks up there what a ``function_list`` names.
    """
    from tensorflow.python.eager import context

    for function in graph_def.library.function:
        if function.signature.name.startswith(prefix):
            context.context().add_function_def(function)


def import_here(graph_def: Any, replaced: dict[str, Any], wanted: Sequence[str]) -> list[Any]:
    """Imports the graph into the function that is being traced; ``replaced`` maps tensor names to tensors."""
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    inside = {name: graph.capture(t) if hasattr(graph, "capture") else t for name, t in replaced.items()}
    return list(tf.graph_util.import_graph_def(graph_def, inside, list(wanted), name=""))


def without_placeholders(graph_def: Any) -> Any:
    """The graph without its inputs, which whoever imports it provides."""
    made = type(graph_def)()
    made.CopyFrom(graph_def)
    del made.node[:]
    made.node.extend(node for node in graph_def.node if node.op != "Placeholder")
    return made


class Packed:
    """A nest of values taken apart into its tensors, the parts of composite ones too, and the rest.

    Numpy arrays count as tensors, as they do for a ``tf.function``.
    """

    def __init__(self, values: Any) -> None:
        import tensorflow as tf

        self._like = values
        self._flat = tf.nest.flatten(values, expand_composites=True)
        self._places = [place for place, value in enumerate(self._flat) if _is_tensor(value)]
        self.tensors = [self._flat[place] for place in self._places]

    @property
    def specs(self) -> list[Any]:
        """TensorSpecs of the tensors."""
        import tensorflow as tf

        return [tf.TensorSpec(tensor.shape, tf.as_dtype(tensor.dtype)) for tensor in self.tensors]

    def tensors_of(self, values: Any) -> list[Any]:
        """The tensors of a nest with the same signature."""
        import tensorflow as tf

        flat = tf.nest.flatten(values, expand_composites=True)
        return [flat[place] for place in self._places]

    def unpack(self, tensors: Sequence[Any]) -> Any:
        """The nest with other tensors in it."""
        import tensorflow as tf

        flat = list(self._flat)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        return tf.nest.pack_sequence_as(self._like, flat, expand_composites=True)


def as_tensors(values: Any) -> Any:
    """What a ``tf.function`` makes of its results: numbers and variables become tensors, None stays."""
    import tensorflow as tf

    def convert(value: Any) -> Any:
        return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)

    return tf.nest.map_structure(convert, values, expand_composites=True)


def _is_tensor(value: Any) -> bool:
    import tensorflow as tf

    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))


def signature(values: Any) -> Any:
    """Equal for nests of the same structure, shapes, dtypes and other values."""
    import tensorflow as tf

    flat = tf.nest.flatten(values, expand_composites=True)
    parts = [(tuple(v.shape), str(v.dtype)) if _is_tensor(v) else _hashable(v) for v in flat]
    return repr(tf.nest.map_structure(lambda _: None, values, expand_composites=False)), tuple(parts)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def compiled_function(body: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """A ``tf.function`` that XLA compiles, for these inputs only."""
    import tensorflow as tf

    plain = tf.autograph.experimental.do_not_convert(body)
    made = tf.function(plain, input_signature=list(specs), jit_compile=True, autograph=False)
    made._omit_frequent_tracing_warning = True
    return made


def run_errors() -> tuple[type[BaseException], ...]:
    """What a compiled function raises where XLA cannot compile or start it."""
    import tensorflow as tf

    return (tf.errors.OpError,)


def hlo_of(function: Any, specs: Sequence[Any], stage: str = "hlo") -> str:
    """The HLO text of a compiled function before (``hlo``) or after (``optimized_hlo``) XLA's passes."""
    text: str = function.experimental_get_compiler_ir(*specs)(stage=stage)
    return text


_CALL = re.compile(r"= .* call\(.*" + STREAM_ATTRIBUTE + r'="(\d+)"')


def stream_calls(hlo: str) -> list[int]:
    """The stream of each annotated call in an HLO text."""
    return [int(match[1]) for line in hlo.splitlines() if (match := _CALL.search(line))]
