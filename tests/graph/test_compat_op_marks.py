"""Attributes of all ops in a block: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from grappler_passes import plugin
from grappler_passes.analysis.steps import SUM_ATTR, TURN_ATTR
from tf_ooo.compat import func_graphs, tf_functions


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


def test_leave_sums():
    graph_def = tf.compat.v1.GraphDef()
    for op in ("AddN", "AddV2", "Mul"):
        graph_def.node.add(name=op, op=op)
    func_graphs.leave_sums(graph_def)
    assert [len(node.attr) for node in graph_def.node] == [1, 1, 0]
