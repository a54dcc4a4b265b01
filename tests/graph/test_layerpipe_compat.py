"""TensorFlow's private API that the LayerPipe mode uses: what breaks here when an upgrade changes it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.compat import graph_def_of, info_of
from grappler_passes.variables import VARIABLE_ATTR
from tests.zoo import keras
from tf_ooo.layerpipe import compat
from tf_ooo.pipeline.compat import value_of

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def test_a_register_takes_batches_of_any_size():
    """The shape of what was stored, not of what is being stored."""
    register = compat.register("float32", (None, 3), CPU)
    assert register.shape.rank is None
    assert register.numpy().shape == (0, 3)

    def body(x):
        before = tf.ensure_shape(register.read_value(), (None, 3))
        register.assign(x, read_value=False)
        return tf.reshape(before, tf.shape(before)), tf.shape(before)[0]

    step = compat.function(body, [tf.TensorSpec([None, 3])])
    assert [int(step(tf.ones((rows, 3)))[1]) for rows in (4, 2, 7)] == [0, 4, 2]
    assert compat.register("int64", (), CPU).numpy().shape == ()


def test_open_rows():
    assert compat.open_rows(tf.TensorSpec([4, 3])).shape.as_list() == [None, 3]
    assert compat.open_rows(tf.TensorSpec([])).shape.as_list() == []


def test_variables_have_unique_names():
    layers = [keras.layers.Dense(2, name="same") for _ in range(2)]
    for layer in layers:
        layer.build((None, 2))
    variables = {f"kernel#{n}": layer.kernel for n, layer in enumerate(layers)}
    concrete = compat.concrete_function(lambda x: layers[0](x) + layers[1](x), [tf.TensorSpec([None, 2])])
    graph_def, _ = graph_def_of(concrete)
    compat.name_variables(graph_def, list(concrete.graph.captures), variables)
    named = [node for node in graph_def.node if VARIABLE_ATTR in node.attr]
    names = [json.loads(node.attr[VARIABLE_ATTR].s)["name"] for node in named]
    assert {"kernel#0", "kernel#1"} <= set(names)
    handles = {id(value_of(v).handle) for v in variables.values()}
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
        infos = [info_of(tensor) for tensor in inputs]
    parts = compat.in_two_parts(made.op.node_def, infos, 2, 0, share)
    graph_def = graph.as_graph_def()
    kept = [node for node in graph_def.node if node.name != "dO"]
    del graph_def.node[:]
    graph_def.node.extend([*kept, *parts.nodes])
    with tf.compat.v1.Session(graph=graph) as session:
        expected = session.run("dO:0")
    divided = tf.Graph()
    with divided.as_default():
        tf.import_graph_def(graph_def, name="")
    with tf.compat.v1.Session(graph=divided) as session:
        got, first = session.run(["dO:0", f"{parts.high}:0"])
    assert len(first) == round(11 * share)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert {node.name for node in parts.nodes} == set(parts.outputs)


def test_plain_sgd():
    assert compat.is_plain_sgd(keras.optimizers.SGD(0.1))
    assert not compat.is_plain_sgd(keras.optimizers.SGD(0.1, momentum=0.9))
    assert not compat.is_plain_sgd(keras.optimizers.Adam())
