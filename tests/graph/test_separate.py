from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from graphs import assert_bit_equal, context_of, node, recurrent, run
from tensorflow.core.framework import graph_pb2

from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.graph.training_graph import Op, OpKind, TrainingGraph
from grappler_passes.passes.separate import SeparatePass
from grappler_passes.passes.verify import verify


def ops_of(graph):
    return [made.op for made in graph.node]


def separated(graph):
    text = graph.SerializeToString(deterministic=True)
    result = SeparatePass()(graph)
    assert graph.SerializeToString(deterministic=True) == text
    verify(graph, result.graph_def, replaced=result.replaced)
    again = SeparatePass()(result.graph_def)
    assert not again.modified
    assert again.graph_def == result.graph_def
    return result


@tf.function
def gated(x, w):
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = tf.reduce_sum(tf.tanh(x @ w))
    return tf.tuple(tape.gradient(loss, [x, w]))


VALUES = [np.linspace(-1, 1, 12).reshape(3, 4).astype("f"), np.linspace(0, 1, 8).reshape(4, 2).astype("f")]
SPECS = [tf.TensorSpec([3, 4]), tf.TensorSpec([4, 2])]


def two_identities(graph):
    """The two MatMuls of the backward pass, and what the graph's ends hang on."""
    index = GraphIndex(graph)
    return index, [index.names[i] for i in index.order if index.ops[i] == "MatMul"][1:]


def test_tuple_gate_is_opened():
    concrete = gated.get_concrete_function(*SPECS)
    graph = concrete.graph.as_graph_def()
    inputs, outputs = [t.name for t in concrete.inputs], [t.name for t in concrete.outputs]
    index, (one, two) = two_identities(graph)
    ends = [name.split(":")[0] for name in outputs]
    assert all(index.implied(m, end) for m in (one, two) for end in ends)
    result = separated(graph)
    assert result.modified
    new = GraphIndex(result.graph_def)
    assert all(sum(new.implied(m, end) for m in (one, two)) == 1 for end in ends)
    assert_bit_equal(run(graph, inputs, outputs, VALUES), run(result.graph_def, inputs, outputs, VALUES))


def test_gate_without_its_group_is_opened():
    graph = graph_pb2.GraphDef()
    node(graph, "a", "Placeholder", dtype=1)
    node(graph, "g", "Exp", "a", T=1)
    node(graph, "h", "Sin", "a", T=1)
    node(graph, "p", "Identity", "g", "^h", T=1)
    node(graph, "q", "Identity", "h", "^g", T=1)
    node(graph, "r", "Identity", "a", "^h", T=1)  # a wait of another kind
    after = separated(graph).graph_def
    assert [list(made.input) for made in after.node][3:] == [["g"], ["h"], ["a", "^h"]]


def test_gate_over_side_effects_stays():
    graph = graph_pb2.GraphDef()
    node(graph, "a", "Placeholder", dtype=1)
    node(graph, "g", "Exp", "a", T=1)
    node(graph, "s", "PrintV2", "a")
    node(graph, "n", "NoOp", "^g", "^s")
    node(graph, "p", "Identity", "g", "^n", T=1)
    assert not separated(graph).modified


def test_opened_gate_keeps_the_read_before_the_write():
    graph = graph_pb2.GraphDef()
    node(graph, "v", "_Arg")
    node(graph, "a", "_Arg")
    node(graph, "read", "ReadVariableOp", "v")
    node(graph, "g", "Exp", "a", T=1)
    node(graph, "h", "Mul", "read", "a", T=1)
    node(graph, "n", "NoOp", "^g", "^h")
    node(graph, "p", "Identity", "g", "^n", T=1)
    node(graph, "write", "AssignVariableOp", "v", "p")
    result = separated(graph)
    assert list(result.graph_def.node[6].input) == ["g"]
    assert list(result.graph_def.node[7].input) == ["v", "p", "^read"]


def test_identity_n_is_split():
    @tf.function
    def function(x, w):
        a, b = tf.identity_n([tf.exp(x), tf.sin(w)])
        c, d = tf.identity_n([b, a])
        with tf.control_dependencies([c]):
            e = tf.identity(x)
        return a + 1, b, d, e

    concrete = function.get_concrete_function(*SPECS)
    graph = concrete.graph.as_graph_def()
    inputs, outputs = [t.name for t in concrete.inputs], [t.name for t in concrete.outputs]
    assert "IdentityN" in ops_of(graph)
    result = separated(graph)
    assert "IdentityN" not in ops_of(result.graph_def)
    index = GraphIndex(result.graph_def)
    add = next(index.names[i] for i in index.order if index.ops[i] == "AddV2")
    sin = next(index.names[i] for i in index.order if index.ops[i] == "Sin")
    assert not index.implied(sin, add)
    assert_bit_equal(run(graph, inputs, outputs, VALUES), run(result.graph_def, inputs, outputs, VALUES))


def test_fused_kernels_say_why_they_stay():
    @tf.function
    def function(x, scale):
        with tf.GradientTape() as tape:
            tape.watch([x, scale])
            y, _, _ = tf.compat.v1.nn.fused_batch_norm(x, scale, scale)
        return tape.gradient(y, [x, scale])

    concrete = function.get_concrete_function(tf.TensorSpec([2, 3, 3, 4]), tf.TensorSpec([4]))
    graph = concrete.graph.as_graph_def()
    result = separated(graph)
    name = next(made.name for made in graph.node if made.op.startswith("FusedBatchNormGrad"))
    assert list(result.mixed) == [name]
    assert "reductions" in result.mixed[name]
    # With a frozen scale the kernel computes dO alone.
    del graph.node[:]
    node(graph, "a", "Placeholder", dtype=1)
    node(graph, "bn", "FusedBatchNormGradV3", "a", "a", "a", "a", "a", "a")
    node(graph, "b", "Exp", "bn", T=1)
    assert not separated(graph).mixed


# More steps than the executor runs at a time (10), and none at all.
@pytest.mark.parametrize("steps", [0, 1, 15])
def test_weight_gradients_leave_the_gradient_loop(steps):
    graph, inputs, outputs, values = recurrent(steps)
    result = separated(graph)
    assert ops_of(result.graph_def).count("LoopCond") == ops_of(graph).count("LoopCond") + 1
    done = [note for note in result.notes if "sum moved" in note.reason]
    assert len(done) == 1
    assert len(done[0].nodes) == 2
    assert not result.mixed
    before, after = GraphIndex(graph), GraphIndex(result.graph_def)
    frames = {context_of(before, name).frame for name in done[0].nodes}
    assert len(frames) == 1
    assert all(context_of(after, name).frame not in frames for name in done[0].nodes)
    # The gradient of the input waits for the first loop alone.
    gradient = outputs[0].split(":")[0]
    assert not any(after.implied(name, gradient) for name in done[0].nodes)
    assert_bit_equal(run(graph, inputs, outputs, values), run(result.graph_def, inputs, outputs, values))


def test_a_conditional_in_the_loop_keeps_results_bit_equal():
    graph, inputs, outputs, values = recurrent(
        6, lambda t, h, u: tf.cond(t % 2 > 0, lambda: tf.sin(h @ u), lambda: tf.exp(h) @ u)
    )
    result = separated(graph)
    assert result.modified or result.mixed
    assert_bit_equal(run(graph, inputs, outputs, values), run(result.graph_def, inputs, outputs, values))


def test_a_nested_loop_says_why_it_stays():
    def inner(t, h, u):
        return tf.while_loop(lambda k, h: k < 3, lambda k, h: (k + 1, tf.tanh(h @ u)), (0, h))[1]

    graph, inputs, outputs, values = recurrent(4, inner)
    result = separated(graph)
    assert result.modified or result.mixed
    assert_bit_equal(run(graph, inputs, outputs, values), run(result.graph_def, inputs, outputs, values))


def test_the_training_graph_says_which_sums_are_weight_gradients():
    graph, inputs, outputs, values = recurrent(5, sliced=True)
    # Sliced, the input's gradient is a sum over the steps as well: nothing would be left for dO.
    assert not SeparatePass()(graph).modified
    index = GraphIndex(graph)
    ends = [name for name, op in zip(index.names, index.ops, strict=True) if op == "Exit" and "grad" in name]
    weights = [name for name in ends if any(index.implied(name, end.split(":")[0]) for end in outputs[1:])]
    assert len(weights) == 2
    kinds = {name: OpKind.WEIGHT_GRAD if name in weights else OpKind.OUTPUT_GRAD for name in ends}
    ops = {name: Op(name, "Exit", kind) for name, kind in kinds.items()}
    result = SeparatePass()(graph, TrainingGraph(ops=ops, layers=(), variables=()))
    assert result.modified
    verify(graph, result.graph_def, replaced=result.replaced)
    frames = {name: context_of(GraphIndex(result.graph_def), name).frame for name in ends}
    assert frames[weights[0]] == frames[weights[1]]
    assert all(frames[name] != frames[weights[0]] for name in ends if name not in weights)
    assert_bit_equal(run(graph, inputs, outputs, values), run(result.graph_def, inputs, outputs, values))
