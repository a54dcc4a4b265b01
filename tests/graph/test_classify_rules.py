"""One small step for each rule of the classifier: what it is for, and what it must not touch."""

from __future__ import annotations

import pytest
import tensorflow as tf
from graphs import node
from tensorflow.core.framework import graph_pb2

import tf_ooo
from grappler_passes import plugin
from grappler_passes.analysis.classify import classify_graph_def
from grappler_passes.compat import runtime
from grappler_passes.graph.dependencies import GraphIndex, has_side_effects, only_reads, states_of
from grappler_passes.graph.training_graph import OpKind

X = tf.TensorSpec((5, 3))


def classified(step, *specs):
    """The TrainingGraph of a traced step."""
    return classify_graph_def(*runtime.graph_def_of(tf.function(step).get_concrete_function(*specs)))


def kinds(graph, op_type):
    """The kinds of all ops of a type, in topological order, those that serve nothing left out."""
    return [op.kind.value for op in graph.ops.values() if op.type == op_type and op.kind is not OpKind.OTHER]


def variables(*shapes):
    return [tf.Variable(tf.random.normal(shape, seed=i), name=f"w{i}") for i, shape in enumerate(shapes)]


def descend(tape, loss, weights):
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)


def test_hidden_loss_is_forward():
    """Nothing is returned: the forward ops are told by the gradients that they change."""
    weights = variables((3, 4), (4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.tanh(x @ weights[0]) @ weights[1]) ** 2)
        descend(tape, loss, weights)

    graph = classified(step, X)
    assert kinds(graph, "Tanh") == ["F"]
    assert kinds(graph, "MatMul")[0] == "F"
    assert [len(layer.weight_grad_ops) > 0 for layer in graph.layers] == [True, True]


def test_bias_that_the_first_batch_sets():
    """Weight normalization with data: what a branch writes before the forward pass reads is no update."""
    kernel, bias = variables((3, 4), (4,))
    started = tf.Variable(False, trainable=False)

    def start(x):
        with tf.control_dependencies([bias.assign(-tf.reduce_mean(x @ kernel, 0)), started.assign(True)]):
            return tf.constant(0.0)

    def step(x):
        first = tf.cond(started, lambda: 0.0, lambda: start(x))
        with tf.GradientTape() as tape, tf.control_dependencies([first]):
            loss = tf.reduce_sum(tf.nn.bias_add(x @ kernel, bias) ** 2)
        descend(tape, loss, [kernel, bias])
        return loss

    graphs = []  # flat ones, as branches are functions before
    plugin.load()
    request = plugin.register(plugin.Request("first batch", graphs.append))
    with plugin.tracing(request):
        tf.function(step)(tf.ones((5, 3)))
    plugin.unregister(request.id)
    graph = classify_graph_def(graphs[0])
    assert {name for layer in graph.layers for name in layer.variables} == {"w0", "w1"}
    assert kinds(graph, "BiasAddGrad") == ["dW"]


def test_slots_that_only_a_fused_update_reads():
    """Keras' legacy optimizers: one op without a result reads and writes the weight and its slots."""
    weights = variables((3, 4), (4, 2))
    slots = [tf.Variable(tf.zeros_like(weight), name=f"m{i}") for i, weight in enumerate(weights)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.tanh(x @ weights[0]) @ weights[1]) ** 2)
        for weight, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            arguments = {"lr": 0.1, "grad": gradient, "momentum": 0.9}
            tf.raw_ops.ResourceApplyKerasMomentum(var=weight.handle, accum=slot.handle, **arguments)
        return loss

    graph = classified(step, X)
    assert len(graph.variables) == 2
    assert [len(variable.slots) for variable in graph.variables] == [1, 1]
    assert len({slot for variable in graph.variables for slot in variable.slots}) == 2


def test_gradient_that_nobody_reads_is_no_result():
    """In a bare GraphDef ops without a reader stand for results; the gradient of x is none."""
    weights = variables((3, 4), (4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1])
        *gradients, of_x = tape.gradient(loss, [*weights, x])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        tf.negative(of_x)

    concrete = tf.function(step).get_concrete_function(X)
    graph = classify_graph_def(concrete.graph.as_graph_def())
    assert kinds(graph, "TanhGrad") == ["dW"]
    assert kinds(graph, "Tanh") == ["F"]


def test_kernel_computed_from_two_weights():
    """The kernel's gradient is no dO, although two weights need it: no other layer does."""
    first, v, g, bias, last = weights = variables((3, 4), (4, 6), (6,), (6,), (6, 2))

    def step(x):
        with tf.GradientTape() as tape:
            kernel = tf.nn.l2_normalize(v, axis=0) * g
            loss = tf.reduce_sum((tf.tanh(tf.tanh(x @ first) @ kernel + bias) @ last) ** 2)
        descend(tape, loss, weights)
        return loss

    graph = classified(step, X)
    assert [layer.variables for layer in graph.layers] == [("w0",), ("w1", "w2", "w3"), ("w4",)]
    of_layer = [layer.weight_grad_ops for layer in graph.layers]
    assert [sum(graph.ops[name].type == "MatMul" for name in ops) for ops in of_layer] == [2, 1, 1]


def test_weights_combined_in_a_regularizer_only():
    """One number, or a product that no data meet, joins no layers."""
    first, second = weights = variables((3, 4), (4, 4))

    def step(x):
        with tf.GradientTape() as tape:
            penalty = tf.nn.l2_loss(first) + tf.nn.l2_loss(second) + tf.reduce_sum((first @ second) ** 2)
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ first) @ second) ** 2) + penalty
        descend(tape, loss, weights)
        return loss

    assert [layer.variables for layer in classified(step, X).layers] == [("w0",), ("w1",)]


def test_network_on_a_table():
    """Numbers that the graph holds are data: the layers stay apart though only the labels are fed."""
    first, second = weights = variables((3, 4), (4, 2))

    def step(labels):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.constant([[0.1, 0.2, 0.3], [0.4, 0.6, 0.5]]) @ first)
            loss = tf.reduce_sum((hidden @ second - labels) ** 2)
        descend(tape, loss, weights)
        return loss

    graph = classified(step, tf.TensorSpec((2, 2)))
    assert [layer.variables for layer in graph.layers] == [("w0",), ("w1",)]


def test_lone_weight_of_the_shape_of_its_output():
    """``x @ w`` has the shape of w by chance; only the gradient is its gradient."""
    (weight,) = variables((5, 5))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight) ** 2)
        descend(tape, loss, [weight])
        return loss

    graph = classified(step, tf.TensorSpec((5, 5)))
    assert kinds(graph, "MatMul") == ["F", "dW"]
    assert kinds(graph, "Tanh") == ["F"]
    assert kinds(graph, "AssignSubVariableOp") == ["U"]


def test_seeded_noise_is_data():
    """A generator that sees nothing but noise drawn from a seed variable has gradients, too."""
    weights = variables((3, 4), (4, 2))
    seed = tf.Variable([1, 2], trainable=False)

    def step():
        noise = tf.random.stateless_normal((5, 3), seed)
        seed.assign_add([0, 1])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(noise @ weights[0]) @ weights[1])
        descend(tape, loss, weights)
        return loss

    graph = classified(step)
    assert len(graph.layers) == 2
    assert all(layer.weight_grad_ops for layer in graph.layers)


def test_generator_state_is_read_and_written():
    """RngReadAndSkip returns the counter and moves it on."""
    generator = tf.random.Generator.from_seed(1)
    weights = variables((3, 4))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(generator.normal((5, 3)) @ weights[0]))
        descend(tape, loss, weights)
        return loss

    graph = classified(step)
    assert [v.name for v in graph.variables] == ["w0"]
    assert kinds(graph, "Tanh") == ["F"]


def test_weight_prepared_in_the_forward_pass():
    """The kernel is divided by its norm, written, and read again before the gradient."""
    weights = variables((3, 4), (4, 2))

    def step(x):
        weights[0].assign(weights[0] / tf.norm(weights[0]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1])
        descend(tape, loss, weights)
        return loss

    graph = classified(step, X)
    assert {v.name for v in graph.variables} == {"w0", "w1"}
    assert kinds(graph, "AssignVariableOp") == ["F"]
    assert kinds(graph, "AssignSubVariableOp") == ["U", "U"]


def test_weight_decay_is_no_preparation():
    """It is blind to data like a preparation, but only the update reads what it wrote."""
    weights = variables((3, 4), (4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1])
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign(weight * 0.99)
            weight.assign(weight - 0.1 * gradient)
        return loss

    graph = classified(step, X)
    assert kinds(graph, "AssignVariableOp") == ["U"] * 4


def recurrent(x, weight):
    """A while loop whose gradient loop stores the gradient of each step's input in a list."""
    state = tf.zeros((x.shape[1], 4))
    for t in tf.range(tf.shape(x)[0]):
        state = tf.tanh(x[t] @ weight + state)
    return state


def test_loops_collect_for_the_gradient_loop():
    """The forward loop pushes what is forward; what the gradient loop pushes for the layer below is dO."""
    weights = variables((3, 4), (4, 4), (4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            below = tf.tensordot(x, weights[0], 1)
            loss = tf.reduce_sum(recurrent(below, weights[1]) @ weights[2])
        descend(tape, loss, weights)
        return loss

    graph = classified(step, tf.TensorSpec((6, 5, 3)))
    pushed = {op.name: op.kind.value for op in graph.ops.values() if op.type == "TensorListPushBack"}
    assert set(pushed.values()) == {"F"}
    assert kinds(graph, "TanhGrad") == ["dO"]
    popped = [op for op in graph.ops.values() if op.type == "TensorListPopBack"]
    assert popped
    assert all(op.kind in (OpKind.OUTPUT_GRAD, OpKind.WEIGHT_GRAD) for op in popped)


def test_op_needed_for_its_shape_alone():
    """A dW op waits for it all the same: it does not serve nothing."""
    weights = variables((3, 4), (4, 2))

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ weights[0])
            loss = tf.reduce_sum(h @ weights[1])
        one, two, of_h = tape.gradient(loss, [*weights, h])
        noise = tf.random.normal(tf.shape(tf.cumsum(of_h)))
        weights[0].assign_sub(0.1 * (one + tf.matmul(x, noise, transpose_a=True)))
        weights[1].assign_sub(0.1 * two)
        return loss

    assert kinds(classified(step, tf.TensorSpec((None, 3))), "Cumsum") == ["dW"]


def test_trainable_variable_without_gradient_is_named():
    used, read_only, copied = variables((3, 4), (3, 4), (3, 4))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ used + x @ read_only))
        descend(tape, loss, [used])
        copied.assign(copied * 0.9)
        return loss

    graph = classified(step, X)
    assert [v.name for v in graph.variables] == ["w0"]
    assert list(graph.unclassified) == ["w2"]  # w1 is frozen
    assert "depend on its gradient" in graph.unclassified["w2"]


def bad(*rows):
    graph = graph_pb2.GraphDef()
    for name, op, *inputs in rows:
        made = node(graph, name, op, *inputs)
        if op == "Identity":
            made.attr["T"].type = 1
    return graph


@pytest.mark.parametrize(
    ("graph", "name", "match"),
    [
        (bad(("a", "Identity", "missing")), "a", "missing"),
        (bad(("a", "NoSuchOp")), "a", "NoSuchOp"),
        (bad(("a", "Identity", "b"), ("b", "Identity", "a")), "a", "cycle"),
        (bad(("a", "NoOp"), ("a", "NoOp")), "a", "duplicate"),
    ],
    ids=["dangling", "unknown", "cycle", "duplicate"],
)
def test_malformed_graph_names_the_node(graph, name, match):
    with pytest.raises(tf_ooo.GraphError, match=match) as raised:
        tf_ooo.classify(graph)
    assert raised.value.node == name


def test_unreadable_node_is_a_graph_error():
    with pytest.raises(tf_ooo.GraphError, match="node a"):
        tf_ooo.classify(bad(("a", "MatMul")))


@pytest.mark.parametrize(
    "op",
    ["RngReadAndSkip", "StatefulUniform", "StatefulStandardNormalV2", "LogUniformCandidateSampler",
     "CudnnRNNV3", "XlaCallModule", "Stage", "OrderedMapStage", "Assign", "ScatterAdd", "Abort"],
)  # fmt: skip
def test_side_effects_are_tensorflows_own(op):
    assert has_side_effects(op)


@pytest.mark.parametrize("op", ["_Arg", "_Retval", "VarHandleOp", "RefSwitch", "FusedBatchNormV3"])
def test_ops_that_only_hand_on(op):
    assert not has_side_effects(op)


def test_an_op_acts_on_all_its_handles():
    """ResourceApplyMomentum changes the weight and its momentum."""
    graph = graph_pb2.GraphDef()
    for name in ("w", "m"):
        node(graph, name, "VarHandleOp")
    for name in ("lr", "g", "mu"):
        node(graph, name, "Const")
    node(graph, "apply", "ResourceApplyMomentum", "w", "m", "lr", "g", "mu")
    index = GraphIndex(graph)
    assert states_of(index, index.of("apply")) == {"w", "m"}
    assert not only_reads("RngReadAndSkip")
