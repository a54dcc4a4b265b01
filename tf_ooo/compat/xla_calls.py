"""Makes functions that XLA compiles as a whole, and calls of them; tells which ops may be in one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from grappler_passes.compat import runtime
from tf_ooo.compat import func_graphs, tf_functions, xla
from tf_ooo.compat.func_graphs import COMPILED

# A call carries the sizes of its arguments in this attribute: a function has none.
_SHAPES = "_ooo_shapes"
_KERNELS = {"CPU": "XLA_CPU_JIT", "GPU": "XLA_GPU_JIT"}
Shapes = Sequence[Any]  # each a sequence of sizes, all known: other ops are in no call


def call_node(name: str, function: Any, inputs: Sequence[str], shapes: Shapes = ()) -> Any:
    """Return the NodeDef of a call of a FunctionDef, with arguments of these shapes."""
    signature = function.signature
    node = node_def_pb2.NodeDef(name=name, op="PartitionedCall", input=inputs)
    node.attr["f"].func.name = signature.name
    node.attr["Tin"].list.type.extend(argument.type for argument in signature.input_arg)
    node.attr["Tout"].list.type.extend(result.type for result in signature.output_arg)
    node.attr[COMPILED].b = True
    node.attr[_SHAPES].list.shape.extend(tf.TensorShape(shape).as_proto() for shape in shapes)
    for attribute in ("config", "config_proto", "executor_type"):
        node.attr[attribute].s = b""
    return node


def is_call(node: Any) -> bool:
    """Return whether a NodeDef comes from :func:`call_node`; users let XLA compile functions, too."""
    return _SHAPES in node.attr


def shapes_of(call: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the arguments of a NodeDef of :func:`call_node`."""
    return tuple(tuple(dim.size for dim in shape.dim) for shape in call.attr[_SHAPES].list.shape)


def function_def(name: str, nodes: Sequence[Any], inputs: Any, outputs: Any) -> Any:
    """Return :func:`tf_ooo.compat.func_graphs.function_def`, marked so that no graph optimizer inlines it."""
    function = func_graphs.function_def(name, nodes, inputs, outputs)
    function.attr[COMPILED].b = function.attr["_noinline"].b = True
    return function


@functools.lru_cache
def _kernels(op_type: str, device_type: str) -> tuple[Any, ...]:
    from tensorflow.python.framework import kernels

    _compile_once()
    wanted = _KERNELS.get(device_type)
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return tuple(kernel for kernel in registered if kernel.device_type == wanted)


@functools.cache
def _compile_once() -> None:
    """Compile once, because TensorFlow registers XLA's kernels at its first compilation."""
    specs = [tf.TensorSpec((), tf.float32)]
    tf_functions.plain_function(lambda x: x + x, specs, compiled=True)(tf.constant(0.0))


def can_compile(node: Any, device_type: str) -> bool:
    """Return whether XLA has a kernel for a NodeDef, with its types, on ``CPU`` or ``GPU``."""
    return any(
        all(
            node.attr[limit.name].type in limit.allowed_values.list.type
            for limit in kernel.constraint
            if limit.name in node.attr and limit.allowed_values.list.type
        )
        for kernel in _kernels(node.op, device_type)
    )


def run_calls(calls: Sequence[tuple[Any, str, Shapes]], times: int = 1) -> Callable[[], None]:
    """Return a function that makes calls with zeros ``times`` times, in order on each device, and waits.

    ``calls``: FunctionDefs, each with the device it runs on and the shapes of its arguments.  Running it
    raises tf.errors.OpError if XLA cannot compile one.
    """
    graph_def, lasts = graph_pb2.GraphDef(), dict[str, str]()  # the latest call on each device
    for number, (function, device, shapes) in enumerate(calls):
        arguments = zip(function.signature.input_arg, shapes, strict=True)
        before = [f"^{lasts[device]}"] if device in lasts else []
        zeros = [
            _zeros(graph_def, f"zero_{number}_{place}", argument.type, shape, device, before)
            for place, (argument, shape) in enumerate(arguments)
        ]
        for place in range(times):
            node = call_node(f"call_{number}_{place}", function, [*zeros, *before])
            node.device = device
            graph_def.node.append(node)
            lasts[device], before = node.name, [f"^{node.name}"]
    by_name = {function.signature.name: function for function, _, _ in calls}
    graph_def.library.function.extend(by_name.values())

    def body() -> None:
        ops = tf.graph_util.import_graph_def(graph_def, None, list(lasts.values()), name="")
        tf.compat.v1.get_default_graph().control_outputs.extend(ops)

    function = tf.compat.v1.wrap_function(body, [])

    def run() -> None:
        with runtime.calls_not_optimized():
            function()

    return run


def _zeros(
    graph_def: graph_pb2.GraphDef,
    name: str,
    dtype: int,
    shape: Sequence[int],
    device: str,
    before: Sequence[str],
) -> str:
    """Add a node that makes zeros of this shape, after the nodes ``before``; return its name."""
    sizes = xla.constant_node(f"{name}_sizes", np.array(shape, np.int32))
    zero = xla.constant_node(f"{name}_zero", np.zeros((), tf.as_dtype(dtype).as_numpy_dtype))
    inputs = [sizes.name, zero.name, *before]
    filled = node_def_pb2.NodeDef(name=name, op="Fill", input=inputs, device=device)
    filled.attr["T"].type, filled.attr["index_type"].type = dtype, sizes.attr["dtype"].type
    graph_def.node.extend([sizes, zero, filled])
    return name
