"""LayerPipe: nodes that are put in place of others."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import runtime, shape_inference
from grappler_passes.graph.variables import VARIABLE_ATTR
from tests.graph.compat_models import run_with
from tests.zoo import keras
from tf_ooo.compat import keras_variables, tf_functions
from tf_ooo.modes.layerpipe.spread import _share_of_rows, in_two_parts, lower_shares
from tf_ooo.modes.layerpipe.traced import name_variables
from tf_ooo.modes.layerpipe.turns import ReseedPass


def test_variables_have_unique_names():
    layers = [keras.layers.Dense(2, name="same") for _ in range(2)]
    for layer in layers:
        layer.build((None, 2))
    variables = {f"kernel#{n}": layer.kernel for n, layer in enumerate(layers)}
    concrete = tf_functions.concrete_function(
        lambda x: layers[0](x) + layers[1](x), [tf.TensorSpec([None, 2])]
    )
    graph_def, _ = runtime.graph_def_of(concrete)
    captured = {inside.op.name: outside for outside, inside in concrete.graph.captures}
    name_variables(graph_def, captured, variables)
    named = [node for node in graph_def.node if VARIABLE_ATTR in node.attr]
    names = [json.loads(node.attr[VARIABLE_ATTR].s)["name"] for node in named]
    assert {"kernel#0", "kernel#1"} <= set(names)
    handles = {id(keras_variables.value_of(v).handle) for v in variables.values()}
    assert handles <= {id(outside) for outside, _ in concrete.graph.captures}


@pytest.mark.parametrize("share", [0.3, 0.5, 0.97])
def test_an_op_in_two_parts(share):
    """A convolution's dO: the rows of both parts, with the share of the first."""
    rng = np.random.default_rng(0)
    filters = rng.normal(size=(3, 3, 2, 5)).astype("float32")
    gradient = rng.normal(size=(11, 6, 6, 5)).astype("float32")
    graph = tf.Graph()
    with graph.as_default():
        sizes = tf.constant([11, 6, 6, 2], name="sizes")
        inputs = [sizes, tf.constant(filters, name="w"), tf.constant(gradient, name="g")]
        made = tf.raw_ops.Conv2DBackpropInput(
            input_sizes=sizes,
            filter=inputs[1],
            out_backprop=inputs[2],
            strides=[1] * 4,
            padding="SAME",
            name="dO",
        )
        infos = [shape_inference.info_of(tensor) for tensor in inputs]
    nodes, high, outputs = in_two_parts(made.op.node_def, infos, share)
    graph_def = graph.as_graph_def()
    kept = [node for node in graph_def.node if node.name != "dO"]
    del graph_def.node[:]
    graph_def.node.extend([*kept, *nodes])
    with tf.compat.v1.Session(graph=graph) as session:
        expected = session.run("dO:0")
    divided = tf.Graph()
    with divided.as_default():
        tf.import_graph_def(graph_def, name="")
    with tf.compat.v1.Session(graph=divided) as session:
        got, first = session.run(["dO:0", f"{high}:0"])
    assert len(first) == min(round(11 * share), 10)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert {node.name for node in nodes} == set(outputs)


def test_copies_of_a_step_draw_other_numbers():
    tf.random.set_seed(1)
    concrete = tf_functions.concrete_function(
        lambda x: x + tf.random.normal([4], seed=2), [tf.TensorSpec([4])]
    )
    graph_def, (name,) = runtime.graph_def_of(concrete)
    drawn = [run_with(ReseedPass(n)(graph_def).graph_def, {"x:0": np.zeros(4)}, name) for n in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.any(drawn[0] == drawn[2])
    plain = tf.Graph().as_graph_def()
    assert ReseedPass(1)(plain).graph_def is plain


def test_an_output_gradient_is_divided_by_seconds_not_by_the_rows_of_one_op():
    from grappler_passes.graph.dependencies import GraphIndex

    graph = tf.Graph()
    with graph.as_default():
        first = tf.nn.relu(tf.compat.v1.placeholder(tf.float32, [6, 4], "given"), "before")
        tf.sinh(tf.matmul(first, tf.ones([4, 4]), name="product"), "after")
    where = dict.fromkeys(("before", "product", "after"), ("dO", 1))
    traced = types.SimpleNamespace(where=where, index=GraphIndex(graph.as_graph_def()))
    seconds = {"before": 2.0, "product": 6.0, "after": 2.0}
    # The nearer processor takes five of ten seconds: two before the product, and half of it.
    assert _share_of_rows(traced, "product", 1, 0.5, seconds) == 0.5
    assert _share_of_rows(traced, "product", 1, 0.7, seconds) == pytest.approx(5 / 6)
    assert _share_of_rows(traced, "product", 1, 0.1, seconds) == 0.0
    assert _share_of_rows(traced, "product", 1, 0.3, {}) == 0.3


def test_how_far_an_output_gradient_can_be_divided():
    """One of several products is divided, the convolution of a transposed convolution; no sum is."""
    from grappler_passes.graph.dependencies import GraphIndex

    graph = tf.Graph()
    with graph.as_default():
        first = tf.nn.relu(tf.compat.v1.placeholder(tf.float32, [None, 4], "given"), "before")
        products = [tf.matmul(first, tf.ones([4, 4]), name=name) for name in ("query", "key", "value")]
        tf.add_n(products, name="sum")
        picture = tf.nn.relu(tf.compat.v1.placeholder(tf.float32, [None, 5, 5, 2], "picture"), "relu")
        tf.nn.conv2d(picture, tf.ones([3, 3, 2, 4]), 1, "SAME", name="convolution")
        tf.sinh(first, "elementwise")
    graph_def = graph.as_graph_def()
    where = dict.fromkeys(("before", "query", "key", "value", "sum"), ("dO", 1))
    where |= {"relu": ("dO", 2), "convolution": ("dO", 2), "elementwise": ("dO", 0)}
    traced = types.SimpleNamespace(
        where=where,
        graph_def=graph_def,
        index=GraphIndex(graph_def),
        outputs=shape_inference.infer_outputs(graph_def),
        graph=types.SimpleNamespace(layers=range(3)),
    )
    seconds = {"before": 2.0, "query": 1.5, "key": 3.0, "value": 1.5, "sum": 2.0, "convolution": 4.0}
    found = lower_shares(traced, seconds)
    assert found == {0: (1.0, 1.0), 1: pytest.approx((0.5, 0.8)), 2: (0.0, 1.0)}
    assert lower_shares(traced, {}) == {0: (1.0, 1.0)}
