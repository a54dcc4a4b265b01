"""Shapes and dtypes, as TensorFlow infers them: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import runtime, shape_inference
from grappler_passes.compat.shape_inference import InferredOutputs, OutputInfo
from grappler_passes.errors import GraphError
from tests.graph.compat_models import square_step


def test_infer_outputs():
    graph_def, _ = runtime.graph_def_of(square_step()[1])
    outputs = shape_inference.infer_outputs(graph_def)
    assert set(outputs) == {node.name for node in graph_def.node}, "infer_outputs lost nodes"
    handles = [o for info in outputs.values() for o in info if o.dtype == "resource"]
    assert handles, "a variable's handle is no longer of dtype resource"
    argument = next(n.name for n in graph_def.node if n.op == "Placeholder" and n.name == "x")
    assert outputs[argument] == (OutputInfo("float32", (None, 2), 4),), (
        "the C API import no longer gives shapes: costs, peaks and layers go wrong"
    )


def test_infer_outputs_reads_the_shape_behind_a_handle():
    """Read of a variable: known only if the handle's shape reaches shape inference."""
    weight = tf.Variable(np.zeros((4, 5), "float32"))
    function = tf.function(lambda: weight.read_value()).get_concrete_function()
    graph_def, _ = runtime.graph_def_of(function)
    outputs = shape_inference.infer_outputs(graph_def)
    shapes = {outputs[n.name][0].shape for n in graph_def.node if n.op == "ReadVariableOp"}
    assert shapes == {(4, 5)}, "_Arg with _handle_shapes no longer tells what a handle points to"


def test_output_info_is_number():
    assert OutputInfo("bool", (), 1).is_number
    assert not any(OutputInfo(d, (), 1).is_number for d in ("resource", "variant", "string"))


def test_odd_graphs_are_readable():
    """TensorFlow 2.15 makes this of batch normalization with Relu, for channels no multiple of 4."""
    graph_def = tf.compat.v1.GraphDef()
    shape = tf.TensorShape([2, 4, 4, 5]).as_proto()
    for name, dims in (("x", shape), *((n, tf.TensorShape([5]).as_proto()) for n in "abcd")):
        node = graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tf.float32.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(dims)
    norm = graph_def.node.add(name="norm", op="_FusedBatchNormEx", input=["x", "a", "b", "c", "d", "^a"])
    for name in "TU":
        norm.attr[name].type = tf.float32.as_datatype_enum
    norm.attr["num_side_inputs"].i, norm.attr["activation_mode"].s = 0, b"Relu"
    outputs = shape_inference.infer_outputs(graph_def)
    assert outputs["norm"][0].shape == (2, 4, 4, 5)
    assert outputs["norm"][1].shape == (5,)
    assert graph_def.node[-1].op == "_FusedBatchNormEx", "the graph itself must stay as it is"


def test_some_outputs_and_what_follows_from_static_shapes():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (2, 3), "x")
        tf.raw_ops.Shape(input=x, name="sizes")
    outputs = shape_inference.infer_some_outputs(graph.as_graph_def())
    assert isinstance(outputs, InferredOutputs)
    assert list(outputs) == ["x", "sizes"]
    assert outputs["x"] == (shape_inference.info_of(x),) == (OutputInfo("float32", (2, 3), 4),)
    assert list(outputs.constant("sizes", 0)) == [2, 3], "tensor_util no longer computes sizes"
    assert outputs.constant("x", 0) is None


def test_what_tensorflow_cannot_read_is_a_graph_error():
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="lost", op="Identity", input=["nowhere"])
    with pytest.raises(GraphError, match="TensorFlow cannot read the graph"), shape_inference.graph_errors():
        shape_inference.infer_outputs(graph_def)
