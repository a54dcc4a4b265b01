"""Recurrent layers in several loops: what a new Keras breaks."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.zoo import keras, layers, needs_keras_3
from tf_ooo.compat import keras_loops

pytestmark = needs_keras_3

STEPS, ROWS, FEATURES = 19, 3, 4
KINDS = {
    "lstm": lambda **options: layers.LSTM(5, **options),
    "gru": lambda **options: layers.GRU(5, **options),
    "simple": lambda **options: layers.SimpleRNN(5, **options),
    "cells": lambda **options: layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], **options),
}
OPTIONS = {
    "last": {},
    "sequences": {"return_sequences": True, "return_state": True},
    "backwards": {"return_sequences": True, "go_backwards": True},
    "zeros": {"return_sequences": True, "zero_output_for_mask": True},
}
MASKS = ("none", "scattered", "first_steps_and_a_whole_row")


def data_and_mask(name):
    random = np.random.default_rng(0)
    mask = random.random((ROWS, STEPS)) < 0.6
    if name == "first_steps_and_a_whole_row":
        mask[:] = np.arange(STEPS) >= 13
        mask[0] = False
    values = random.normal(size=(ROWS, STEPS, FEATURES)).astype("float32")
    return values, None if name == "none" else mask


def computed(layer, values, mask, count):
    """Outputs and gradients, in a function; how many while loops it has."""

    @tf.function
    def step(values):
        with keras_loops.in_parts(count), tf.GradientTape() as tape:
            tape.watch(values)
            outputs = tf.nest.flatten(layer(values, mask=mask))
            loss = tf.add_n([tf.reduce_sum(output**2) for output in outputs])
        return outputs, tape.gradient(loss, [values, *layer.trainable_variables])

    results = tf.nest.map_structure(np.asarray, step(tf.constant(values)))
    ops = step.get_concrete_function(tf.constant(values)).graph.get_operations()
    return results, sum(op.type in ("While", "StatelessWhile") for op in ops)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_several_loops_compute_what_one_does(kind, options, mask):
    """Outputs to the bit; gradients of weights are added up in another order."""
    keras.utils.set_random_seed(2)
    values, masked = data_and_mask(mask)
    layer = KINDS[kind](**OPTIONS[options])
    layer(values)
    (outputs, gradients), loops = computed(layer, values, masked, 1)
    (outputs_of_parts, gradients_of_parts), loops_of_parts = computed(layer, values, masked, 3)
    assert (loops, loops_of_parts) == (2, 6), (
        "keras.src.backend.rnn is no longer what a recurrent layer calls"
    )
    for whole, parted in zip(outputs, outputs_of_parts, strict=True):
        np.testing.assert_array_equal(parted, whole)
    for whole, parted in zip(gradients, gradients_of_parts, strict=True):
        np.testing.assert_allclose(parted, whole, rtol=2e-5, atol=2e-6)


def test_weights_are_read_before_the_loops():
    """A weight that is read in a loop is sent in each of its time steps, where another device holds it."""
    layer = layers.LSTM(5)
    values, _ = data_and_mask("none")
    layer(values)

    @tf.function
    def step(values):
        with keras_loops.in_parts(2):
            return layer(values)

    graph_def = step.get_concrete_function(tf.constant(values)).graph.as_graph_def()
    inside = [node.op for function in graph_def.library.function for node in function.node_def]
    assert "MatMul" in inside
    assert "ReadVariableOp" not in inside
    reads = [node for node in graph_def.node if node.op == "ReadVariableOp"]
    assert len(reads) == len(layer.trainable_variables)
    assert all(isinstance(weight._value, tf.Variable) for weight in layer.trainable_variables)


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        pytest.param(lambda: layers.LSTM(5, unroll=True), STEPS, id="unrolled"),
        pytest.param(lambda: layers.LSTM(5), 11, id="too_few_steps"),
        pytest.param(lambda: layers.LSTM(5), None, id="a_number_that_is_not_known"),
    ],
)
def test_what_stays_one_loop(layer, steps):
    layer = layer()
    layer.build((ROWS, steps, FEATURES))

    @tf.function(input_signature=[tf.TensorSpec((ROWS, steps, FEATURES))])
    def step(values):
        with keras_loops.in_parts(3):
            return layer(values)

    types = [op.type for op in step.get_concrete_function().graph.get_operations()]
    assert sum(op in ("While", "StatelessWhile") for op in types) == (0 if layer.unroll else 1)


def test_other_threads_keep_their_loops():
    values, _ = data_and_mask("none")
    layer = layers.LSTM(5)
    layer(values)
    counts = []

    def traced():
        graph = tf.function(layer).get_concrete_function(tf.constant(values)).graph
        counts.append(sum(op.type.endswith("While") for op in graph.get_operations()))

    with keras_loops.in_parts(2):
        traced()
        thread = threading.Thread(target=traced)
        thread.start()
        thread.join()
    traced()
    assert counts == [2, 1, 1]


def test_all_is_as_before_an_error():
    from keras.src import backend

    before = backend.rnn, layers.RNN.inner_loop
    with contextlib.suppress(ZeroDivisionError), keras_loops.in_parts(2):
        assert backend.rnn is not before[0]
        1 / 0  # noqa: B018
    assert (backend.rnn, layers.RNN.inner_loop) == before


def test_loops():
    model = keras.Sequential(
        [
            keras.Input((STEPS, FEATURES)),
            layers.Bidirectional(layers.LSTM(5, return_sequences=True)),
            layers.GRU(5, unroll=True),
            layers.Dense(2),
        ]
    )
    names = {title.split("/")[-1].split("_")[0] for title in keras_loops.loops(model)}
    assert names == {"forward", "backward"}
