"""Functions as TensorFlow's runtime knows them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.graph.graphs import as_optimizers_get_it
from tf_ooo.compat import func_graphs, function_defs, tf_functions, xla_calls
from tf_ooo.compat.function_defs import OptimizedGraph

SPECS = [tf.TensorSpec([None, 2]), tf.TensorSpec([])]


def step_of(weight, large):
    """Adds to a variable, and reads it before."""

    def step(x, factor):
        before = weight.read_value()
        weight.assign_add(factor * tf.reduce_sum(x, axis=0))
        return before + tf.reduce_sum(large), tf.identity(factor)

    return tf_functions.concrete_function(step, SPECS)


def test_a_graph_is_called_as_it_is():
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable([10.0, 20.0])
    large = tf.ones([200])  # too large for a constant
    concrete = step_of(weight, large)
    captured = [other.handle if tensor is weight.handle else tensor for tensor in concrete.captured_inputs]
    function = OptimizedGraph(as_optimizers_get_it(concrete), concrete, captured)
    before, factor = function(tf.ones([3, 2]), tf.constant(2.0))
    assert before.numpy().tolist() == [210.0, 220.0]
    assert factor.numpy() == 2.0, "FunctionDef.ret: an argument that is returned"
    assert other.numpy().tolist() == [16.0, 26.0], "FunctionDef.control_ret: what has no result did not run"
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


def test_an_argument_that_was_left_out():
    concrete = tf_functions.concrete_function(lambda x, unused, y: [x - y], [tf.TensorSpec([])] * 3)
    graph_def = as_optimizers_get_it(concrete)
    (unused,) = [node for node in graph_def.node if node.op == "_Arg" and node.attr["index"].i == 1]
    graph_def.node.remove(unused)
    (difference,) = OptimizedGraph(graph_def, concrete, [])(*map(tf.constant, (5.0, 7.0, 1.0)))
    assert difference.numpy() == 4.0


def test_a_tensor_that_nobody_computes():
    weight, large = tf.Variable([1.0, 2.0]), tf.ones([200])
    concrete = step_of(weight, large)
    graph_def = as_optimizers_get_it(concrete)
    for node in [node for node in graph_def.node if node.op == "Mul"]:
        graph_def.node.remove(node)
    with pytest.raises(ValueError, match="it lacks mul:0"):
        OptimizedGraph(graph_def, concrete, concrete.captured_inputs)


def with_a_call(concrete, compiled):
    """The graph with the product in a function."""
    graph_def = as_optimizers_get_it(concrete)
    (product,) = [node for node in graph_def.node if node.op == "Mul"]
    inside = type(product)()
    inside.CopyFrom(product)
    inside.input[:] = ["a0", "a1"]
    make = xla_calls.function_def if compiled else function_defs.function_def
    given, returned = [("a0", "float32"), ("a1", "float32")], [(f"{product.name}:0", "float32")]
    function = make(function_defs.unique_name("ooo_test"), [inside], given, returned)
    graph_def.library.function.append(function)
    product.CopyFrom(xla_calls.call_node(product.name, function, product.input))
    return graph_def


def test_a_graph_may_call_what_xla_compiles_and_nothing_else():
    weight, large = tf.Variable([1.0, 2.0]), tf.ones([200])
    concrete = step_of(weight, large)
    function = OptimizedGraph(with_a_call(concrete, True), concrete, concrete.captured_inputs)
    function(tf.ones([3, 2]), tf.constant(2.0))
    assert weight.numpy().tolist() == [7.0, 8.0], "AtomicFunction: functions of a library are lost"
    with pytest.raises(ValueError, match="it calls functions"):
        OptimizedGraph(with_a_call(concrete, False), concrete, concrete.captured_inputs)


def test_ports_of():
    """An op's results are named inside of a function by the definition of the op."""
    graph = tf.Graph()
    with graph.as_default():
        tf.split(tf.compat.v1.placeholder(tf.float32, (2,), name="a0"), 2, name="parts")
    nodes = func_graphs.without_placeholders(graph.as_graph_def()).node
    function = function_defs.function_def("f", nodes, [("a0", "float32")], [("parts:1", "float32")])
    ports = function_defs.ports_of(function)
    assert ports["parts:output:1"] == ("parts", 1), "OpDef.output_arg: tensors in functions have other names"
    assert ports["a0"] == ("a0", 0)
