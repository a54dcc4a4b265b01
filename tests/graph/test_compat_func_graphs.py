"""Graphs of functions: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes import plugin
from grappler_passes.analysis.steps import SUM_ATTR, TURN_ATTR
from tests.graph.compat_models import square_step
from tests.graph.graphs import as_optimizers_get_it
from tf_ooo.compat import func_graphs, tf_functions, xla_calls
from tf_ooo.compat.func_graphs import OptimizedGraph
from tf_ooo.errors import BackendError

SPECS = [tf.TensorSpec([None, 2]), tf.TensorSpec([])]


def test_traces_of_a_tf_function():
    weight, concrete = square_step()
    function = tf.function(lambda x: concrete(x) * 2.0)
    function(tf.ones((1, 2)))
    function(tf.ones((3, 2)))
    traced = tf_functions.concrete_functions_of(function)
    assert len(traced) == function.experimental_get_tracing_count()
    found = dict(func_graphs.ops_reached_from(traced[0].graph))
    assert {"Mul", "Sub", "ReadVariableOp"} <= set(found.values()), (
        "FuncGraph._functions: the called functions and their branches are no longer looked at"
    )
    assert any("/" in name for name in found), "ops of functions are named with their function"
    called = dict(func_graphs.ops_called_from(traced[0].graph))
    assert {"Mul", "Sub"} <= set(called.values())
    assert not {op.name for op in traced[0].graph.get_operations()} & called.keys()
    del weight


def test_is_within_another():
    seen = []
    inner = tf.function(lambda: seen.append(func_graphs.is_within_another()), autograph=False)
    inner()
    outer = tf.function(lambda x: seen.append(func_graphs.is_within_another()), autograph=False)
    tf.function(outer, autograph=False)(1.0)
    assert seen == [False, True], "FuncGraph.outer_graph: steps of fit are those of train_on_batch"


def test_made_again():
    @tf.function(autograph=False)
    def function(x):
        first, second = tf.split(tf.clip_by_value(x, -1.0, 1.0), 2)
        again = func_graphs.made_again(first.op, [first.op.inputs[0], x * 10.0])
        return first, again[0], again[1]

    first, again, other = function(tf.constant([0.5, 3.0]))
    assert [first.numpy(), again.numpy(), other.numpy()] == [0.5, 5.0, 30.0], "Graph.create_op"


def test_captures_of():
    weight, concrete = square_step()
    ((outside, inside),) = func_graphs.captures_of(concrete)
    assert outside is weight.handle, "FuncGraph.captures: which variables a step reads is not known"
    assert inside.graph is concrete.graph

    def step():
        return tf.compat.v1.get_default_graph().capture_call_time_value(lambda: 1.0, tf.TensorSpec(()))

    with pytest.raises(BackendError, match="deferred captures"):
        func_graphs.captures_of(tf_functions.concrete_function(step, []))


def test_captured_here_and_imported():
    """A traced function's graph in another one: captures are captured, variables watched."""
    weight, concrete = square_step()
    graph_def = concrete.graph.as_graph_def()
    body = func_graphs.without_placeholders(graph_def)
    assert "Placeholder" in {node.op for node in graph_def.node}
    assert "Placeholder" not in {node.op for node in body.node}

    def step(x):
        captured = func_graphs.captured_here(concrete)
        given = dict(zip([tensor.name for tensor in concrete.inputs], [x, *captured], strict=True))
        return func_graphs.import_here(body, given, [tensor.name for tensor in concrete.outputs], "copy")

    copied = tf_functions.concrete_function(step, [tf.TensorSpec([None, 2])])
    x = tf.constant([[1.0, 2.0]])
    np.testing.assert_array_equal(copied(x)[0], concrete(x))
    assert [variable is weight for variable in copied.graph.variables] == [True]
    names = {op.name for op in copied.graph.get_operations()}
    assert any(name.startswith("copy/") for name in names)


def test_bodies_of():
    """The bodies of a function and of a condition's branches are there: collectives in them are found."""
    graph = square_step()[1].graph
    (call,) = [op for op in graph.get_operations() if op.type.endswith("Call")]
    (body,) = func_graphs.bodies_of(call)
    assert len(body.inputs) == len(call.inputs), "Graph._get_function: what a function is given is not known"
    assert len(body.outputs) == len(call.outputs)
    (condition,) = [op for op in body.get_operations() if op.type.endswith("If")]
    branches = func_graphs.bodies_of(condition)
    assert [len(branch.inputs) for branch in branches] == [len(condition.inputs) - 1] * 2
    assert func_graphs.bodies_of(graph.get_operations()[0]) == []


def test_captured_by():
    seen = []
    given = tf.constant(2.0)

    def outside(tensor):
        return func_graphs.captured_by(tensor.graph).get(id(tensor))

    @tf.function
    def step(x):
        seen.append(outside(x))
        seen.append(tf.cond(x > 0, lambda: [outside(x * given), x][1], lambda: x))
        graph = tf.compat.v1.get_default_graph()
        seen.extend(outside(op.outputs[0]) for op in graph.get_operations() if op.outputs)
        return x * given

    step(tf.ones(()))
    assert seen[0] is None
    assert any(value is given for value in seen), "FuncGraph.captures: what a step reads is not known"


def test_captures_so_far():
    """By a placeholder, and small values as constants."""
    names, weight, small = [], tf.Variable([1.0]), tf.constant([2.0])

    def step():
        total = weight + small
        names.extend(func_graphs.captures_so_far(tf.compat.v1.get_default_graph()))
        return total

    graph = tf_functions.concrete_function(step, []).graph
    types = sorted(graph.get_operation_by_name(name).type for name in names)
    assert types == ["Const", "Placeholder"], "FuncGraph.captures: ops that others share would be copied"


def test_set_random_numbers():
    def drawn(x):
        shuffled = tf.random.shuffle(x) + tf.random.uniform(tf.shape(x))
        kept = tf.random.uniform([2], 0, 9, tf.int32) + 1
        func_graphs.set_random_numbers(tf.compat.v1.get_default_graph(), 0.5)
        return shuffled, kept

    shuffled, kept = tf_functions.concrete_function(drawn, [tf.TensorSpec([None, 1])])(
        tf.constant([[1.0], [2.0]])
    )
    np.testing.assert_array_equal(
        shuffled,
        [[2.5], [1.5]],
        "Operation._update_input: steps with random numbers cannot be compared with their parts",
    )
    np.testing.assert_array_equal(kept, [1, 1])


def test_written_by():
    kept, assigned, branched = (tf.Variable(1.0) for _ in range(3))

    def update():
        branched.assign_add(1.0)
        return branched.read_value()

    @tf.function(autograph=False)
    def inner(x):
        assigned.assign_sub(x)
        return tf.cond(x > 0, update, lambda: kept + x)

    tf_functions.concrete_function(lambda x: inner(x), [tf.TensorSpec([])])
    (concrete,) = tf_functions.concrete_functions_of(inner)
    expected = {id(variable.handle) for variable in (assigned, branched)}
    assert func_graphs.written_by(concrete.graph) == expected, (
        "FuncGraph.captures, Operation.inputs: which weights stock steps train is not known"
    )
    (branches,) = [op for op in concrete.graph.get_operations() if "If" in op.type]
    inside = {id(outer): inner for outer, inner in concrete.graph.captures}
    (written,) = func_graphs.written_by_op(branches)
    assert written is inside[id(branched.handle)], "of a branch it is not known what it writes"


def test_grappler_leaves_marked_sums_a_chain():
    plugin.load()
    seen = []
    request = plugin.register(plugin.Request("sums", rewrite=seen.append))
    weight = tf.Variable(np.ones((5, 5), "float32"))

    @tf.function
    def step(x):
        total = None
        for part in tf.split(x, 4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(part @ weight))
            gradient = tape.gradient(loss, weight)
            with func_graphs.marked_sums():
                total = gradient if total is None else total + gradient
        weight.assign_sub(0.1 * total)

    try:
        with plugin.tracing(request):
            step(tf.ones((8, 5)))
    finally:
        plugin.unregister("sums")
    sums = [node for node in seen[-1].node if SUM_ATTR in node.attr]
    assert [node.op for node in sums].count("AddV2") == 3
    assert not any(node.op == "AddN" for node in seen[-1].node)


def nodes_of(step, *specs):
    return tf_functions.concrete_function(step, specs).graph.as_graph_def().node


def test_numbered_steps():
    def step(x):
        with func_graphs.numbered_step(3, "_ooo_test", "scope_"):
            x = tf.exp(x, name="inside")
            with func_graphs.numbered_step(4, "_ooo_test", "scope_"), func_graphs.numbered_turn(1):
                x = tf.exp(x, name="within")
        with func_graphs.numbered_step(0, "_ooo_test", ""):
            x = tf.exp(x, name="unnamed")
        return [tf.exp(x, name="outside")]

    nodes = {node.name: node for node in nodes_of(step, tf.TensorSpec(()))}
    assert nodes["scope_3/inside"].attr["_ooo_test"].i == 3, "Graph._attr_scope no longer marks ops"
    assert nodes["scope_4/within"].attr["_ooo_test"].i == 4, "a scope that ends in a slash is no longer whole"
    assert nodes["scope_4/within"].attr[TURN_ATTR].i == 1
    assert TURN_ATTR not in nodes["scope_3/inside"].attr
    assert "_ooo_test" in nodes["unnamed"].attr
    assert "_ooo_test" not in nodes["outside"].attr


def test_numbered_parts():
    def step(x):
        with func_graphs.numbered_part(2):
            return [tf.exp(x, name="inside")]

    (node,) = (node for node in nodes_of(step, tf.TensorSpec(())) if node.name == "inside")
    assert node.attr[func_graphs.PART_ATTR].i == 2
    with func_graphs.numbered_part(2):
        assert tf.exp(0.0) == 1.0


def test_named_messages():
    def step(x):
        with func_graphs.named_message("one"), func_graphs.numbered_part(2):
            first = tf.exp(x, name="inside")
        with func_graphs.named_message("other"):
            return [first, tf.exp(x, name="beside")]

    nodes = {node.name: node for node in nodes_of(step, tf.TensorSpec(()))}
    assert nodes["inside"].attr["_ooo_message"].s == b"one"
    assert nodes["inside"].attr[func_graphs.PART_ATTR].i == 2
    assert nodes["beside"].attr["_ooo_message"].s == b"other"
    with func_graphs.named_message("one"):
        assert tf.exp(0.0) == 1.0


def test_leave_sums():
    graph_def = tf.compat.v1.GraphDef()
    for op in ("AddN", "AddV2", "Mul"):
        graph_def.node.add(name=op, op=op)
    func_graphs.leave_sums(graph_def)
    assert [len(node.attr) for node in graph_def.node] == [1, 1, 0]


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
    make = xla_calls.function_def if compiled else func_graphs.function_def
    given, returned = [("a0", "float32"), ("a1", "float32")], [(f"{product.name}:0", "float32")]
    function = make(func_graphs.unique_name("ooo_test"), [inside], given, returned)
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
    function = func_graphs.function_def("f", nodes, [("a0", "float32")], [("parts:1", "float32")])
    ports = func_graphs.ports_of(function)
    assert ports["parts:output:1"] == ("parts", 1), "OpDef.output_arg: tensors in functions have other names"
    assert ports["a0"] == ("a0", 0)
