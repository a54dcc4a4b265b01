"""Layers are the same whatever the batch: one example, or as many as a layer has inputs or outputs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras, needs_keras_3

pytestmark = needs_keras_3


def dense(activation):
    layers = [keras.layers.Dense(n, activation) for n in (5, 7, 7)]
    return keras.Sequential([keras.Input((1,)), *layers, keras.layers.Dense(1)])


def normalized():
    layers = [keras.layers.Dense(5), keras.layers.LayerNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *layers])


MODELS = {"relu": lambda: dense("relu"), "linear": lambda: dense(None), "normalized": normalized}


@pytest.mark.parametrize("batch", [1, 5, 7])
@pytest.mark.parametrize("name", MODELS)
def test_kernel_and_bias_are_one_layer(name, batch):
    model = MODELS[name]()
    assert layers_of(model, batch) == layers_of(model, 64)


def layers_of(model, batch):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    inputs = tf.TensorSpec((batch, *model.input_shape[1:]), tf.float32)
    graph = tf_ooo.classify(step.get_concrete_function(inputs, tf.TensorSpec((batch, 1), tf.float32)))
    return [[path.rpartition("/")[0] for path in layer.variables] for layer in graph.layers]


@pytest.mark.devices(2)
@pytest.mark.parametrize("batch", [1, 7])
def test_layerpipe_trains_such_batches(batch):
    keras.utils.set_random_seed(1)
    model = dense("relu")
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(8 * batch, 1)).astype("float32")
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2)
    model.fit(x, x, batch_size=batch, epochs=2, verbose=0, callbacks=[callback])
    assert len(callback.report.layers) == 4


@pytest.mark.devices(2)
def test_micro_batches_of_one_row():
    trained = []
    for callbacks in ([], [tf_ooo.OOOBackprop(mode="pipeline", devices=2, microbatches=7, schedule="zb_h1")]):
        keras.utils.set_random_seed(1)
        model = dense("relu")
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(56, 1)).astype("float32")
        model.fit(x, x, batch_size=7, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
        trained.append(model.get_weights())
    assert len([row for row in callbacks[0].report.layers if row.dW]) == 4
    for stock, parts in zip(*trained, strict=True):
        np.testing.assert_allclose(parts, stock, rtol=1e-4, atol=1e-6)
