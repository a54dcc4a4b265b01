"""Asks TensorFlow's runtime in this process for devices, plug-ins and functions, traced ones included."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

HANDLE_SHAPES = "_handle_shapes"
"""Attribute of an ``_Arg``: shapes of what a variable's handle points to."""
VARIABLE_ATTR = "_ooo_variable"
"""This attribute marks arguments that are variables: JSON ``{"name": str, "trainable": bool}``."""


def load_library(path: str) -> None:
    """Load a graph optimizer.  A second one for the same device type aborts the process.

    ``load_pluggable_device_library`` would rescan the devices and forget which of them the user chose.
    """
    from tensorflow.python.client import pywrap_tf_session

    pywrap_tf_session.TF_LoadPluggableDeviceLibrary(path)


def load_ops(path: str) -> Any:
    """Load a library of ops that is not linked with TensorFlow; return the module of their functions.

    TensorFlow 2.15 shows its C API only to what is linked with it.
    """
    import tensorflow as tf

    framework = os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
    ctypes.CDLL(framework, mode=ctypes.RTLD_GLOBAL)
    return tf.load_op_library(path)


def has_gpu() -> bool:
    """Return whether TensorFlow sees a GPU, without initializing it."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def runtime_devices() -> frozenset[str]:
    """Return the full names of this process' and its cluster's devices, once TensorFlow has run an op."""
    return frozenset(_context().devices())


def device_memory_bytes() -> dict[str, int]:
    """Return the memory that TensorFlow may use on each device of this process and its cluster, by full name.

    For a CPU TensorFlow always says 256 MiB.
    """
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session

    context = _context()
    context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(context._context_handle)
    try:
        name_of, bytes_of = pywrap_tfe.TF_DeviceListName, pywrap_tf_session.TF_DeviceListMemoryBytes
        numbers = range(pywrap_tfe.TF_DeviceListCount(devices))
        return {name_of(devices, number): bytes_of(devices, number) for number in numbers}
    finally:
        pywrap_tfe.TF_DeleteDeviceList(devices)


def host_device(device: str) -> str:
    """Return the CPU on the machine of a device, given and returned as full names."""
    import tensorflow as tf

    spec = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
    name: str = spec.to_string()
    return name


def register_functions(graph_def: graph_pb2.GraphDef) -> None:
    """Make the library's functions known to TensorFlow's runtime, where XLA looks them up."""
    context = _context()
    for function in graph_def.library.function:
        if not context.has_function(function.signature.name):
            context.add_function_def(function)


def kept_functions(functions: Iterable[Any]) -> list[Any]:
    """Make FunctionDefs known to TensorFlow's runtime if it does not know them.

    They stay known while the returned list, or any other function of these names, is alive.
    """
    from tensorflow.core.function.polymorphism import function_type
    from tensorflow.python.eager.polymorphic_function import atomic_function

    context, kept = _context(), []
    for function in functions:
        if not context.has_function(function.signature.name):
            context.add_function_def(function)
        counted = atomic_function.AtomicFunction(
            function.signature.name, context, function_type.FunctionType([])
        )
        kept.append(counted)
    return kept


def call_function(name: str, inputs: Sequence[Any], results: int) -> list[Any]:
    """Call a function that the runtime knows (no nests, no captures); return its ``results`` results."""
    returned: list[Any] | None = _context().call_function(name.encode(), list(inputs), results)
    return returned or []


def keep_order_on_workers() -> None:
    """Make ops that write to variables on workers be waited for; call it before workers are joined.

    By default TensorFlow streams these ops, and the next function call may overtake them: metrics were once
    counted on from before their reset.  If the user has set the environment variable, his value stays.
    """
    os.environ.setdefault("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "false")


@contextlib.contextmanager
def failing_where_cut_off() -> Iterator[None]:
    """In the block, calls to workers fail when their connection does.

    By default TensorFlow reconnects to workers for ever, even to one that never answers.
    """
    name = "GRPC_FAIL_FAST"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def keep_functions() -> None:
    """Keep all functions that the runtime holds now until the process ends.

    A runtime that has joined workers asks them to forget each function that goes. It prints two lines of
    error for each function older than the joining, and for each when the workers are gone.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function

    uses = getattr(atomic_function, "RUNTIME_FUNCTION_REFS", {})
    for name in list(uses):
        uses[name] += 1


def abort_collectives(why: str) -> None:
    """Make TensorFlow's collectives in this process, waiting or later, fail with UnavailableError."""
    import tensorflow as tf

    _context().abort_collective_ops(tf.errors.UNAVAILABLE, why)


def calls_not_optimized() -> AbstractContextManager[None]:
    """Run functions called in the block as they are: no graph optimizer sees them."""
    return _calling(_no_optimizers)


def calls_without_idle_optimizers() -> AbstractContextManager[None]:
    """Spare functions called in the block the graph optimizers that look at everything and change nothing.

    On CPUs alone the layout optimizer converts nothing, and the memory optimizer only takes sums apart; if
    the user has set them himself, they run.  They sort the graph and give it shapes in another dialect,
    twice, which took 15% of the seconds before the first step of MobileNetV2.
    """
    on_cpus = all("/device:CPU:" in name for name in runtime_devices())
    return _calling(_no_idle_optimizers) if on_cpus else contextlib.nullcontext()


def _no_optimizers(options: Any) -> None:
    options.disable_meta_optimizer = True


def _no_idle_optimizers(options: Any) -> None:
    if options.cpu_layout_conversion == options.NO_CONVERSION_ON_CPU:
        options.MergeFrom(type(options)(layout_optimizer=options.OFF))
    if options.memory_optimization == options.DEFAULT_MEM_OPT:
        options.memory_optimization = options.NO_MEM_OPT
    options.MergeFrom(type(options)(disable_tfg_optimizer=True))


@contextlib.contextmanager
def _calling(change: Callable[[Any], None]) -> Iterator[None]:
    here = _context()
    before = here.function_call_options
    here.function_call_options = _call_options(before.config_proto_serialized, change)
    try:
        yield
    finally:
        here.function_call_options = before


@functools.lru_cache(maxsize=4)
def _call_options(config_proto: bytes, change: Callable[[Any], None]) -> Any:
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.python.eager import context

    config = config_pb2.ConfigProto.FromString(config_proto)
    change(config.graph_options.rewrite_options)
    return context.FunctionCallOptions(config_proto=config)


def _context() -> Any:
    from tensorflow.python.eager import context

    return context.context()


def graph_def_of(concrete_function, own_names=None):
    """Return (GraphDef, names of the result ops); placeholders of captured variables say which they are.

    ``own_names`` names some variables by the id of their handles; all others have TensorFlow's names.
    """
    graph = concrete_function.graph
    graph_def = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    # graph.variables raises if a variable has been deleted since the trace.
    living = [variable for ref in graph._weak_variables if (variable := ref()) is not None]
    by_handle = {id(variable.handle): variable for variable in living}
    captured = [
        (internal, by_handle.get(id(external)))
        for external, internal in graph.captures
        if internal.dtype.name == "resource" and internal.op.name in nodes
    ]
    known = own_names or {}
    names = numbered(
        [known.get(id(v.handle), v.name.partition(":")[0]) for _, v in captured if v is not None]
    )
    for internal, variable in captured:
        name = "" if variable is None else next(names)
        _describe_capture(nodes[internal.op.name], internal, variable, name)
    return graph_def, [tensor.op.name for tensor in concrete_function.outputs]


def numbered(names: Sequence[str]) -> Iterator[str]:
    """Yield the names; a name that was there before gets ``_1``, ``_2``, ... appended.

    Layers that a subclassed Keras model builds when it is called have variables of the same names.
    """
    taken, seen = set(names), set()
    for name in names:
        free, number = name, 0
        while free in seen or (number and free in taken):
            number += 1
            free = f"{name}_{number}"
        seen.add(free)
        yield free


def _describe_capture(node, placeholder, variable, name) -> None:
    from tensorflow.python.ops import handle_data_util

    handle_data = handle_data_util.get_resource_handle_data(placeholder)
    for pointed in handle_data.shape_and_type if handle_data.is_set else ():
        node.attr[HANDLE_SHAPES].list.shape.add().CopyFrom(pointed.shape)
        node.attr["_handle_dtypes"].list.type.append(pointed.dtype)
    if variable is not None:
        described = {"name": name, "trainable": bool(variable.trainable)}
        node.attr[VARIABLE_ATTR].s = json.dumps(described).encode()


def func_graph_transforms() -> list[Callable[[Any], None]]:
    """Return the functions that TensorFlow calls with each ``FuncGraph`` it has traced."""
    from tensorflow.python.eager.polymorphic_function import transform

    transforms: list[Callable[[Any], None]] = transform.FUNC_GRAPH_TRANSFORMS
    return transforms


def set_string_attr(op: tf.Operation, name: str, value: str) -> None:
    """Set an attribute of an op that is already in a graph."""
    from tensorflow.core.framework import attr_value_pb2

    op._set_attr(name, attr_value_pb2.AttrValue(s=value.encode()))
