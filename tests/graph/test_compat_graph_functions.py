"""Functions of optimized graphs: what an upgrade breaks."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tf_ooo.compat import tf_functions
from tf_ooo.compat.func_graphs import OptimizedGraph

SPECS = [tf.TensorSpec([None, 2]), tf.TensorSpec([])]


def step_of(weight, large):
    """Adds to a variable, and reads it before."""

    def step(x, factor):
        before = weight.read_value()
        weight.assign_add(factor * tf.reduce_sum(x, axis=0))
        return before + tf.reduce_sum(large), tf.identity(factor)

    return tf_functions.concrete_function(step, SPECS)


def as_optimizers_get_it(concrete):
    """The graph with ends in the place of its inputs and outputs."""
    graph_def = concrete.graph.as_graph_def()
    places = {tensor.op.name: place for place, tensor in enumerate(concrete.graph.inputs)}
    for node in graph_def.node:
        if node.name in places:
            dtype = node.attr["dtype"].type
            node.op = "_Arg"
            node.attr.clear()
            node.attr["T"].type, node.attr["index"].i = dtype, places[node.name]
    for place, tensor in enumerate(concrete.graph.outputs):
        node = graph_def.node.add(name=f"returned_{place}", op="_Retval", input=[tensor.name])
        node.attr["T"].type, node.attr["index"].i = tensor.dtype.as_datatype_enum, place
    return graph_def


def test_a_graph_is_called_as_it_is():
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable([10.0, 20.0])
    large = tf.ones([200])  # too large for a constant
    concrete = step_of(weight, large)
    captured = [other.handle if tensor is weight.handle else tensor for tensor in concrete.captured_inputs]
    function = OptimizedGraph(as_optimizers_get_it(concrete), concrete, captured)
    before, factor = function(tf.ones([3, 2]), tf.constant(2.0))
    assert before.numpy().tolist() == [210.0, 220.0]
    assert factor.numpy() == 2.0, "wrap_function: an argument that is returned"
    assert other.numpy().tolist() == [16.0, 26.0], "FuncGraph.control_outputs: what has no result did not run"
    assert weight.numpy().tolist() == [1.0, 2.0]


def test_what_is_no_whole_function():
    weight, large = tf.Variable([1.0, 2.0]), tf.ones([200])
    concrete = step_of(weight, large)
    graph_def = as_optimizers_get_it(concrete)
    kept = [node for node in graph_def.node if node.op != "AssignAddVariableOp"]
    del graph_def.node[:]
    graph_def.node.extend(kept)
    with pytest.raises(ValueError, match="it lacks AssignAdd"):
        OptimizedGraph(graph_def, concrete, concrete.captured_inputs)
