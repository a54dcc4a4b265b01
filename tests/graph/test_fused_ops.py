"""Each op that TensorFlow's remapper has fused computes what its parts do."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from grappler_passes.compat import graph_protos
from tests.graph.graphs import run
from tests.graph.test_compile_tasks import Traced, numbers, task
from tf_ooo.compat import xla_calls
from tf_ooo.rewriting.task_calls import parts_of

FLOAT = tf.float32.as_datatype_enum
ACTIVATIONS = ("Relu", "Relu6", "Elu", "Tanh", "Sigmoid", "LeakyRelu")
NOT_OF_CPUS = ("Tanh", "Sigmoid")  # convolutions on CPUs are not fused with these
FUSED = [("BiasAdd",), *(("BiasAdd", activation) for activation in ACTIVATIONS)]


def fused_node(op, inputs, **attributes):
    """The NodeDef of an op with the defaults of what is not given."""
    graph = graph_pb2.GraphDef()
    node = graph.node.add(name="fused", op=op, input=inputs)
    for attribute in graph_protos.op_def(op).attr:
        node.attr[attribute.name].CopyFrom(attribute.default_value)
    node.attr["T"].type = FLOAT
    for name, value in attributes.items():
        held = node.attr[name]
        held.Clear()
        if isinstance(value, bool):
            held.b = value
        elif isinstance(value, float):
            held.f = value
        elif isinstance(value, str):
            held.s = value.encode()
        elif isinstance(value[0], str):
            held.list.s.extend(text.encode() for text in value)
        else:
            held.list.i.extend(value)
    return node


def with_bias(op, inputs, fused, **attributes):
    node = fused_node(op, [*inputs, "bias"], fused_ops=list(fused), leakyrelu_alpha=0.3, **attributes)
    node.attr["num_args"].i = 1
    if "TArgs" in node.attr:
        node.attr["TArgs"].list.type.append(FLOAT)
    return node


def assert_same(node, parts, values):
    """Both graphs, run on these inputs, return the same."""
    results = []
    for nodes in ([node], parts):
        graph_def = graph_pb2.GraphDef(node=nodes)
        for name in values:
            graph_def.node.add(name=name, op="Placeholder").attr["dtype"].type = FLOAT
        named = [f"{name}:0" for name in values]
        results.append(run(graph_def, named, ["fused:0"], list(values.values()))[0])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", FUSED, ids="-".join)
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_products(fused, transposed):
    node = with_bias("_FusedMatMul", ["a", "b"], fused, transpose_b=transposed)
    parts = parts_of(node)
    assert [part.op for part in parts] == ["MatMul", *fused]
    assert all(xla_calls.can_compile(part, "CPU") for part in parts)
    b = numbers(5, 3) if transposed else numbers(3, 5)
    assert_same(node, parts, {"a": 4 * numbers(2, 3), "b": b, "bias": numbers(5)})


@pytest.mark.parametrize("fused", [fused for fused in FUSED if fused[-1] not in NOT_OF_CPUS], ids="-".join)
@pytest.mark.parametrize(("strides", "padding"), [([1, 1, 1, 1], "SAME"), ([1, 2, 2, 1], "VALID")])
def test_convolutions(fused, strides, padding):
    node = with_bias("_FusedConv2D", ["x", "filter"], fused, strides=strides, padding=padding)
    parts = parts_of(node)
    assert [part.op for part in parts] == ["Conv2D", *fused]
    assert all(xla_calls.can_compile(part, "CPU") for part in parts)
    assert_same(node, parts, {"x": numbers(2, 5, 6, 3), "filter": numbers(2, 2, 3, 4), "bias": numbers(4)})


@pytest.mark.parametrize(
    "names", [("Relu",), ("Exp", "Neg"), ("Tanh", "Square", "Sigmoid"), ("Relu", "Relu6")]
)
def test_chains(names):
    node = fused_node("_UnaryOpsComposition", ["x"], op_names=list(names))
    parts = parts_of(node)
    assert [part.op for part in parts] == list(names)
    assert_same(node, parts, {"x": numbers(3, 4)})


@pytest.mark.parametrize("fused", [("BiasAdd", "Add"), ("BiasAdd", "GeluApproximate"), ("FusedBatchNorm",)])
def test_what_is_not_known_is_left(fused):
    """Such an op stays outside of calls: XLA has no kernel for it."""
    node = with_bias("_FusedMatMul", ["a", "b"], fused)
    assert parts_of(node) == []
    assert not xla_calls.can_compile(node, "CPU")


def test_other_ops_have_no_parts():
    graph = tf.Graph()
    with graph.as_default():
        tf.identity(tf.matmul([[1.0]], [[2.0]]))
    assert all(parts_of(node) == [] for node in graph.as_graph_def().node)


def dense(x):
    """Two micro-batches of a layer, whose weights are arguments."""
    results = []
    weights, bias = tf.identity(x[:3] * 0.5), tf.identity(x[0])
    for number in range(2):
        rows = x[2 * number : 2 * number + 2]
        with task(f"F_{number}"):
            out = tf.nn.relu(tf.nn.bias_add(tf.matmul(rows, weights), bias), name="out")
            results.append(tf.exp(-out))
    return results


def fuse(graph_def):
    """Do what the remapper does."""
    nodes = {node.name: node for node in graph_def.node}
    for number in range(2):
        product, sum_ = nodes[f"F_{number}/MatMul"], nodes[f"F_{number}/BiasAdd"]
        inputs = [*product.input, sum_.input[1]]
        fused = with_bias("_FusedMatMul", inputs[:2], ("BiasAdd", "Relu"))
        fused.name, fused.input[:] = f"F_{number}/out", inputs
        nodes[f"F_{number}/out"].CopyFrom(fused)
    gone = {f"F_{number}/{op}" for number in range(2) for op in ("MatMul", "BiasAdd")}
    kept = [node for node in graph_def.node if node.name not in gone]
    del graph_def.node[:]
    graph_def.node.extend(kept)


def test_in_a_call_they_are_their_parts():
    result = Traced(dense, numbers(4, 3), change=fuse).assert_runs_alike(2, 1)
    (function,) = result.graph_def.library.function
    assert {"MatMul", "BiasAdd", "Relu"} <= {node.op for node in function.node_def}
    assert [note for note in result.notes if note.status == "left"] == []
