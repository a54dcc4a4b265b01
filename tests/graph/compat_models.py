"""Small functions and models for the tests of compat."""

from __future__ import annotations

import json

import numpy as np
import tensorflow as tf

from tests.zoo import keras

X, Y = np.ones((12, 3), "float32"), np.ones((12, 2), "float32")


def square_step():
    """A variable and a function that calls another one, reads the variable and has a branch."""
    weight = tf.Variable([1.0, 2.0], name="weight")

    @tf.function
    def inner(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * weight, lambda: x - weight)

    function = tf.function(lambda x: inner(x) + 1.0)
    return weight, function.get_concrete_function(tf.TensorSpec([None, 2]))


def dense_model(optimizer="sgd", **compile_options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", **{"jit_compile": False, **compile_options})
    return model


def normalized_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.compile("adam", "mse")
    return model


def described(graph_def):
    """The JSON of ``_ooo_variable``, one per placeholder that has it."""
    return [json.loads(n.attr["_ooo_variable"].s) for n in graph_def.node if "_ooo_variable" in n.attr]


def run_with(graph_def, feed, name):
    """Runs a graph with a variable's value in place of its reading."""
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    with tf.compat.v1.Session(graph=graph) as session:
        return session.run(f"{name}:0", feed)
