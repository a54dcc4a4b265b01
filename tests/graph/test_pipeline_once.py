"""The forward pass assigns once a step what it computes from weights alone, not for each micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import pipelined
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(4), needs_keras_3]

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")


class OwnSpectral(keras.layers.Layer):
    """Divides its kernel by an estimate of its norm, and keeps the estimate's vector, not the kernel."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.vector = self.add_weight(shape=(8, 1), name="vector", trainable=False, initializer="ones")

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        left = tf.math.l2_normalize(kernel @ tf.convert_to_tensor(self.vector))
        right = tf.math.l2_normalize(tf.transpose(kernel) @ left)
        self.vector.assign(tf.stop_gradient(right))
        norm = tf.transpose(tf.stop_gradient(left)) @ kernel @ tf.stop_gradient(right)
        return tf.nn.relu(x @ (kernel / norm))


class Clipped(keras.layers.Dense):
    """Its kernel stays small."""

    def call(self, x):
        self.kernel.assign(keras.ops.clip(self.kernel, -0.3, 0.3))
        return super().call(x)


class Counted(keras.layers.Dense):
    """Counts its calls, and is scaled by their number."""

    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=(), name="calls", trainable=False, initializer="ones")

    def call(self, x):
        self.calls.assign_add(1.0)
        return super().call(x) / keras.ops.sqrt(self.calls)


LAYERS = {
    "spectral": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(8, "relu")),
    "twice": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(8, "relu"), power_iterations=2),
    "own": OwnSpectral,
    "clipped": lambda: Clipped(8, "relu"),
    "counted": lambda: Counted(8, "relu"),
}


def trained(name, *callbacks, batch=12):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu"), LAYERS[name](), LAYERS[name](), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, X[:, :1], batch_size=batch, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model.get_weights()


def assert_close(stock, ours):
    for expected, weights in zip(stock, ours, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_as_stock(name, microbatches):
    callback = pipelined("zb_h1", devices=2, microbatches=microbatches)
    assert_close(trained(name), trained(name, callback))
    assert not any("assign" in note for note in callback.report.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "devices": 4},
        {"schedule": "zb_v", "devices": 2},
        {"schedule": "modulo", "devices": 2},
        {"schedule": "1f1b", "devices": 4, "replicas": 2},
    ],
    ids=str,
)
def test_in_all_schedules(options):
    schedule = options.pop("schedule")
    assert_close(trained("spectral"), trained("spectral", pipelined(schedule, microbatches=4, **options)))


@pytest.mark.parametrize("name", LAYERS)
def test_micro_batches_of_unequal_size(name):
    """They are not copies of one: each computes for itself what is assigned once."""
    callback = pipelined("zb_h1", devices=2, microbatches=5)
    assert_close(trained(name), trained(name, callback))
    assert not any("assign" in note or "changes" in note for note in callback.report.notes)
