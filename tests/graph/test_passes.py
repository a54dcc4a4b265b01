from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from graphs import assert_bit_equal, edge_set, flat, node, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import graph_pb2

from grappler_passes.errors import PassError, PlanError, VerifyError
from grappler_passes.graph.dependencies import GraphIndex
from grappler_passes.passes.base import Pass, PassPipeline, PassResult, relaxed_by
from grappler_passes.passes.rewrite_plan import AnnotatePass, OrderPass, PlacementPass, RewritePlan
from grappler_passes.passes.verify import VerifyPass, verify

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@st.composite
def graphs_and_plans(draw):
    size = draw(st.integers(1, 14))
    numbers = st.integers(0, size - 1)
    graph = graph_pb2.GraphDef()
    for i in range(size):
        preds = {p for p in draw(st.lists(numbers, max_size=3)) if p < i}
        node(graph, f"n{i}", "NoOp", *(f"^n{p}" for p in sorted(preds)))
    edges = draw(st.lists(st.tuples(numbers, numbers), max_size=20))
    return graph, RewritePlan(edges=tuple((f"n{a}", f"n{b}") for a, b in edges))


@settings(max_examples=200, deadline=None)
@given(graphs_and_plans())
def test_order_is_acyclic_minimal_complete_and_idempotent(case):
    graph, plan = case
    text = graph.SerializeToString(deterministic=True)
    result = OrderPass(plan)(graph)
    assert graph.SerializeToString(deterministic=True) == text
    after = GraphIndex(result.graph_def)
    added = edge_set(result.graph_def) - edge_set(graph)
    assert result.modified == bool(added)
    skipped = {note.nodes for note in result.notes}
    for before, target in plan.edges:
        assert after.implied(before, target) != ((before, target) in skipped)
    for text, target in added:
        less = graph_pb2.GraphDef()
        less.CopyFrom(result.graph_def)
        next(n for n in less.node if n.name == target).input.remove(text)
        assert not GraphIndex(less).implied(text[1:], target)
    again = OrderPass(plan)(result.graph_def)
    assert not again.modified
    assert again.graph_def == result.graph_def
    verify(graph, result.graph_def)


def network():
    weights = [tf.Variable(np.linspace(-1, 1, 64).reshape(8, 8).astype("f")) for _ in range(3)]

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, weights)

    # Constants in place of variables, so that the flat graph runs on its own.
    from tensorflow.python.framework import convert_to_constants

    concrete = gradients.get_concrete_function(tf.TensorSpec([4, 8]))
    return convert_to_constants.convert_variables_to_constants_v2(concrete)


def test_ordered_network_is_bit_equal_and_runs_in_order(tmp_path):
    frozen = network()
    graph = frozen.graph.as_graph_def()
    inputs, outputs = [frozen.inputs[0].name], [t.name for t in frozen.outputs]
    index = GraphIndex(graph)
    matmuls = [index.names[i] for i in index.order if index.ops[i] == "MatMul"]
    # Every MatMul after the one before it, where that is possible, from the back to the front.
    plan = RewritePlan(
        edges=tuple(
            pair
            for one, two in zip(matmuls[:-1], matmuls[1:], strict=True)
            for pair in ((two, one), (one, two))
        ),
        kinds=dict.fromkeys(matmuls, "dW"),
        layers={matmuls[0]: 0},
        streams=dict.fromkeys(matmuls, 1),
        priorities={matmuls[0]: -1},
    )
    pipeline = PassPipeline(
        [OrderPass(plan), AnnotatePass(plan), VerifyPass(graph, allowed=relaxed_by(OrderPass, AnnotatePass))],
        dump_dir=tmp_path,
    )
    text = graph.SerializeToString(deterministic=True)
    result = pipeline(graph)
    assert graph.SerializeToString(deterministic=True) == text
    assert result.modified
    assert result.notes
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_input.pbtxt",
        "01_order.pbtxt",
        "02_annotate.pbtxt",
        "03_verify.pbtxt",
    ]
    value = np.linspace(0, 1, 32).reshape(4, 8).astype("f")
    assert_bit_equal(run(graph, inputs, outputs, [value]), run(result.graph_def, inputs, outputs, [value]))
    first = next(made for made in result.graph_def.node if made.name == matmuls[0])
    assert first.attr["_ooo_kind"].s == b"dW"
    assert first.attr["_ooo_layer"].i == 0
    assert first.attr["_ooo_layer"].WhichOneof("value") == "i"
    assert first.attr["_ooo_stream"].i == 1
    assert first.attr["_ooo_priority"].i == -1
    again = pipeline(result.graph_def)
    assert not again.modified
    assert again.graph_def == result.graph_def


@tf.function
def conditional_in_a_loop(x):
    def body(i, v):
        return i + 1, tf.cond(tf.reduce_sum(v) > 1, lambda: tf.sin(v) * 2, lambda: tf.exp(v) + tf.sin(v))

    return tf.while_loop(lambda i, v: i < 5, body, (0, x))[1] + tf.cos(x)


@pytest.mark.parametrize("seed", range(4))
def test_any_legal_edges_keep_control_flow_running(seed):
    graph, inputs, outputs = flat(conditional_in_a_loop, tf.TensorSpec([3]))
    names = [made.name for made in graph.node]
    pairs = np.random.default_rng(seed).integers(0, len(names), (2000, 2))
    plan = RewritePlan(edges=tuple((names[a], names[b]) for a, b in pairs))
    result = OrderPass(plan)(graph)
    assert len(edge_set(result.graph_def) - edge_set(graph)) > 10
    assert any("frames" in note.reason for note in result.notes)
    assert any("dead" in note.reason for note in result.notes)
    verify(graph, result.graph_def)
    for start in (-1.0, 0.0, 1.0):
        value = np.array([start, 0.3, -0.2], "f")
        stock = run(graph, inputs, outputs, [value])
        assert_bit_equal(stock, run(result.graph_def, inputs, outputs, [value]))


def test_annotate_writes_on_planned_nodes_and_refuses_others():
    graph = graph_pb2.GraphDef()
    node(graph, "a")
    node(graph, "b")
    with pytest.raises(PassError, match="annotates 'zzz', which the graph does not have"):
        AnnotatePass(RewritePlan(kinds={"b": "F", "zzz": "dO"}))(graph)
    result = AnnotatePass(RewritePlan(kinds={"b": "F"}))(graph)
    assert [list(made.attr) for made in result.graph_def.node] == [[], ["_ooo_kind"]]
    assert not any(made.attr for made in graph.node)
    empty = AnnotatePass(RewritePlan())(graph)
    assert empty.graph_def == graph
    assert not empty.modified


class Broken(Pass):
    name = "broken"

    def run(self, graph_def, training_graph):
        raise KeyError("what")


class Dropping(Pass):
    name = "dropping"

    def run(self, graph_def, training_graph):
        return PassResult(graph_pb2.GraphDef(), modified=True)


def test_failing_pass_is_named_with_its_cause():
    graph = graph_pb2.GraphDef()
    node(graph, "a", "Add")
    pipeline = PassPipeline([AnnotatePass(RewritePlan()), Broken()])
    with pytest.raises(PassError, match="'broken' failed: KeyError") as caught:
        pipeline(graph)
    assert caught.value.pass_name == "broken"
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_pipeline_that_verifies_refuses_what_its_passes_did():
    graph = graph_pb2.GraphDef()
    node(graph, "a", "Add")
    pipeline = PassPipeline([Dropping(), VerifyPass(graph)])
    with pytest.raises(PassError, match="'verify'") as caught:
        pipeline(graph)
    assert isinstance(caught.value.__cause__, VerifyError)


def test_placement():
    graph = graph_pb2.GraphDef()
    node(graph, "a")
    with pytest.raises(PassError, match="places 'x', which the graph does not have"):
        PlacementPass(RewritePlan(devices={"a": CPU, "x": CPU}), (CPU,))(graph)
    result = PlacementPass(RewritePlan(devices={"a": CPU}), (CPU,))(graph)
    assert result.graph_def.node[0].device == CPU
    assert not PlacementPass(RewritePlan(devices={"a": CPU}), (CPU,))(result.graph_def).modified
    for device, match in (("GPU:0", "full device name"), (CPU.replace("CPU:0", "CPU:7"), "no device")):
        with pytest.raises(PassError, match=match) as caught:
            PlacementPass(RewritePlan(devices={"a": device}), (CPU,))(graph)
        assert isinstance(caught.value.__cause__, PlanError)
