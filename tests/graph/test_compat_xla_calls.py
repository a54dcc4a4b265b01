"""Functions that XLA compiles as a whole, and calls of them: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import runtime
from tests.zoo import needs_xla_streams
from tf_ooo.compat import func_graphs, tf_functions, xla, xla_calls


@needs_xla_streams
def test_compiled_calls(tmp_path):
    """Built from nodes alone: a call that XLA compiles as a whole, in a graph that is not optimized again."""
    graph = tf.Graph()
    with graph.as_default():
        a = tf.compat.v1.placeholder(tf.float32, (2,), name="a0")
        first, second = tf.split(a * 2.0, 2, name="parts")
        tf.subtract(second, first, name="difference")
    nodes = func_graphs.without_placeholders(graph.as_graph_def()).node
    name, inputs = func_graphs.unique_name("ooo_test"), [("a0", "float32")]
    function = xla_calls.function_def(
        name, nodes, inputs, [("difference", "float32"), ("parts:1", "float32")]
    )
    ports = func_graphs.ports_of(function)
    assert ports["parts:output:1"] == ("parts", 1), "OpDef.output_arg: tensors in functions have other names"
    assert ports["a0"] == ("a0", 0)
    assert dict(function.ret) == {"r0": "difference:z:0", "r1": "parts:output:1"}
    body = tf.compat.v1.GraphDef(versions=graph.as_graph_def().versions)
    body.library.function.append(function)
    body.node.append(xla_calls.call_node("call", function, ["x:0"]))
    runtime.register_functions(body)
    run = tf_functions.plain_function(
        lambda x: func_graphs.import_here(body, {"x:0": x}, ["call:0", "call:1"]), [tf.TensorSpec((2,))]
    )
    with xla.added([f"--xla_dump_to={tmp_path}"]):
        np.testing.assert_array_equal(run(tf.constant([3.0, 4.0])), [[2.0], [8.0]])
    assert list(tmp_path.iterdir()), "_XlaMustCompile: a call of a task is no longer compiled"


@pytest.mark.parametrize(
    ("op", "type", "compiles"),
    [
        ("MatMul", tf.float32, True),
        ("MatMul", tf.int8, False),
        ("_FusedMatMul", tf.float32, False),
        ("StringToNumber", tf.float32, False),
        ("NoSuchOpAnywhere", tf.float32, False),
    ],
)
def test_can_compile(op, type, compiles):
    """TensorFlow lists XLA's kernels only after its first compilation."""
    node = tf.compat.v1.NodeDef(op=op)
    node.attr["T"].type = type.as_datatype_enum
    said = "xla_calls.can_compile: kernels are registered for another device type, or after something else"
    assert xla_calls.can_compile(node, "CPU") is compiles, said
    assert not xla_calls.can_compile(node, "TPU")


def doubled(dtype="float32"):
    """A function of one argument, as of a task."""
    graph = tf.Graph()
    with graph.as_default():
        tf.multiply(tf.compat.v1.placeholder(dtype, None, name="a0"), tf.constant(2, dtype), name="twice")
    nodes = func_graphs.without_placeholders(graph.as_graph_def()).node
    return xla_calls.function_def(
        func_graphs.unique_name("ooo_test"), nodes, [("a0", dtype)], [("twice:0", dtype)]
    )


def test_run_calls(tmp_path):
    """One function is compiled for each shape; TensorFlow lets several calls of it stand in a row."""
    function, device = doubled(), "/job:localhost/replica:0/task:0/device:CPU:0"
    run = xla_calls.run_calls([(function, device, [(2,)]), (function, device, [(3, 4)])], times=3)
    run()
    run()
    with pytest.raises(ValueError, match="shorter|longer"):
        xla_calls.run_calls([(function, device, [])])


def test_shapes_of():
    node = xla_calls.call_node("call", doubled(), ["x"], [(3, 4)])
    assert xla_calls.shapes_of(node) == ((3, 4),)


def test_is_call():
    """A user may have XLA compile a function, too: a call of that is none of a task."""
    node = xla_calls.call_node("call", doubled(), ["x"], [(3, 4)])
    assert xla_calls.is_call(node)
    del node.attr["_ooo_shapes"]
    assert not xla_calls.is_call(node)
