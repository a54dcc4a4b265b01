"""Sums that TensorFlow's memory optimizer takes apart where a graph needs most of a device's memory."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2

from grappler_passes import plugin
from grappler_passes.passes.plain_sums import PlainSumsPass
from grappler_passes.plugin.callback import AnswerError, check_answer


def graph_of_sums(rewrite):
    """Return Grappler's graph of a sum of three tensors of 80 MB, and the sum after ``rewrite``."""
    seen = []

    def look(graph_def):
        seen.append(graph_pb2.GraphDef.FromString(graph_def.SerializeToString()))
        return rewrite(graph_def)

    plugin.load()
    request = plugin.register(plugin.Request("test-plain-sums", look))
    weight = tf.Variable(1.5)
    try:
        with plugin.tracing(request):

            @tf.function
            def step(x):
                terms = [tf.sin(x * weight), tf.cos(x), tf.tanh(x)]
                return tf.reduce_mean(tf.add_n(terms), 0)

            x = tf.reshape(tf.linspace(-3.0, 3.0, 20 * 2**20), (-1, 64))
            found = step(x).numpy()
    finally:
        plugin.unregister(request.id)
    assert not request.errors, request.errors
    return seen[-1], found


def with_plain_sums(graph_def):
    return PlainSumsPass()(graph_def).graph_def


def ops_of(graph_def):
    return sorted(node.op for node in graph_def.node)


def test_a_large_sum_is_one_op_again():
    before, stock = graph_of_sums(lambda graph_def: None)
    # An upgrade after which this fails may take sums apart otherwise: pipelines would have other bits.
    assert {"TemporaryVariable", "DestroyTemporaryVariable", "AssignAdd"} <= set(ops_of(before))
    after = with_plain_sums(before)
    assert "AddN" in ops_of(after)
    assert not {"TemporaryVariable", "DestroyTemporaryVariable", "AssignAdd", "Assign"} & set(ops_of(after))
    (total,) = (node for node in after.node if node.op == "AddN")
    added = {node.name[-1]: node.input[1] for node in before.node if node.op == "AssignAdd"}
    assert list(total.input[:3]) == [added[number] for number in "012"]
    assert total.attr["N"].i == 3
    check_answer(before, after)
    _, found = graph_of_sums(with_plain_sums)
    np.testing.assert_allclose(found, stock, rtol=1e-4, atol=1e-5)


def test_other_graphs_stay():
    graph = graph_pb2.GraphDef()
    graph.node.add(name="a", op="Const")
    assert with_plain_sums(graph) is graph
    graph.node.add(name="sum", op="DestroyTemporaryVariable", input=["sum/tmp_var"])
    graph.node.add(name="sum/tmp_var", op="TemporaryVariable")
    assert ops_of(with_plain_sums(graph)) == ops_of(graph)


def taken_apart():
    """A sum of three as the memory optimizer leaves it."""
    graph = graph_pb2.GraphDef()
    for name in ("a", "b", "c", "early", "late"):
        graph.node.add(name=name, op="Placeholder")
    graph.node.add(name="s/tmp_var", op="TemporaryVariable", input=["^early", "^a"])
    graph.node.add(name="s/tmp_var_zeros", op="ZerosLike", input=["a"])
    graph.node.add(name="s/tmp_var_initializer", op="Assign", input=["s/tmp_var", "s/tmp_var_zeros"])
    for i, text in enumerate(("a", "b", "c")):
        graph.node.add(name=f"s/tmp_var_accum_{i}", op="AssignAdd", input=["s/tmp_var_initializer", text])
    waits = [f"^s/tmp_var_accum_{i}" for i in range(3)]
    graph.node.add(name="s", op="DestroyTemporaryVariable", input=["s/tmp_var_initializer", *waits, "^late"])
    return graph


def test_what_waits_keeps_waiting():
    graph = taken_apart()
    (total,) = (node for node in with_plain_sums(graph).node if node.name == "s")
    assert total.op == "AddN"
    assert list(total.input) == ["a", "b", "c", "^late", "^early"]
    # Read elsewhere: it stays.
    graph.node.add(name="reader", op="Identity", input=["s/tmp_var_accum_1"])
    assert ops_of(with_plain_sums(graph)) == ops_of(graph)


def test_a_sum_of_what_others_read_too_that_was_taken_apart():
    """Both at once, as in a transformer whose residuals are read twice: it could not be trained."""
    before = taken_apart()
    for node in before.node:
        kind = "T" if node.op in ("ZerosLike", "Assign", "AssignAdd", "DestroyTemporaryVariable") else "dtype"
        node.attr[kind].type = types_pb2.DT_FLOAT
    before.node.add(name="other", op="Identity", input=["a"]).attr["T"].type = types_pb2.DT_FLOAT
    after = with_plain_sums(before)
    assert {node.name: node.op for node in after.node}["s"] == "AddV2"
    check_answer(before, after)


def test_a_temporary_variable_that_is_lost_is_refused():
    before, after = graph_pb2.GraphDef(), graph_pb2.GraphDef()
    before.node.add(name="s/tmp_var", op="TemporaryVariable")
    for graph in (before, after):
        graph.node.add(name="s", op="NoOp")
    with pytest.raises(AnswerError, match="side effects"):
        check_answer(before, after)


def shared_sums(count):
    """A sum of ``count`` tensors that others read too, and one that is of its inputs alone."""
    tensors = [tf.compat.v1.placeholder(tf.float32, (64,), name=f"x{number}") for number in range(count)]
    tf.math.add_n(tensors, name="shared")
    tf.math.add_n([tf.sin(tensor) for tensor in tensors], name="alone")


@pytest.mark.parametrize("count", [3, 4, 7, 8, 9, 10, 16, 17, 18, 26])
def test_sums_of_shared_tensors_have_one_order(count):
    """The order is that in which AddN adds where it may begin with the first."""
    graph = tf.Graph()
    with graph.as_default():
        shared_sums(count)
    before = graph.as_graph_def()
    after = with_plain_sums(before)
    ops = {node.name: node.op for node in after.node}
    assert (ops["shared"], ops["alone"]) == ("AddV2", "AddN")
    assert sum(op == "AddV2" for op in ops.values()) == count - 1
    check_answer(before, after)
    values = np.random.default_rng(3).normal(size=(count, 64)).astype("float32")
    given = {f"x{number}:0": row for number, row in enumerate(values)}
    results, settings = [], tf.compat.v1.ConfigProto()
    settings.graph_options.rewrite_options.disable_meta_optimizer = True
    for graph_def in (before, after):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=settings) as session:
            tf.graph_util.import_graph_def(graph_def, name="")
            # Fed tensors belong to whoever feeds them: AddN cannot take the buffer of any.
            results.append(session.run("shared:0", given))
    assert results[0].tobytes() == results[1].tobytes()


def test_sums_of_two_and_of_whole_numbers_stay():
    graph = tf.Graph()
    with graph.as_default():
        shared_sums(2)
        whole = [tf.compat.v1.placeholder(tf.int32, (4,), name=f"whole{number}") for number in range(3)]
        tf.math.add_n(whole, name="of_whole")
        tf.math.add_n(whole, name="of_whole_again")
    assert with_plain_sums(graph.as_graph_def()) == graph.as_graph_def()
