"""Layers under ``keras.remat`` and ``tf.recompute_grad``: the same layers, and the same bits as stock."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras, needs_keras_3

pytestmark = needs_keras_3

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 8, 8, 3)).astype("float32")
Y = RNG.integers(0, 4, 24)
LAYERS = keras.layers
INNER = {
    "convolution": lambda: [LAYERS.Conv2D(6, 3, padding="same"), LAYERS.ReLU()],
    "two": lambda: [LAYERS.Conv2D(6, 3, padding="same", activation="gelu"), LAYERS.Conv2D(5, 1)],
    "depthwise": lambda: [LAYERS.DepthwiseConv2D(3, padding="same", activation="relu")],
    "separable": lambda: [LAYERS.SeparableConv2D(6, 3, padding="same", activation="tanh")],
    "dense": lambda: [LAYERS.Dense(6, "softplus")],
    "normalized": lambda: [LAYERS.Conv2D(6, 3), LAYERS.LayerNormalization(), LAYERS.ReLU()],
}
RECOMPUTE = {
    "keras": lambda function: keras.remat(function),
    "tf": lambda function: tf.recompute_grad(function),
}


class Block(keras.layers.Layer):
    """Some layers, whose forward pass runs again in the backward pass."""

    def __init__(self, inner, again):
        super().__init__()
        self.inner, self.again = keras.Sequential(inner), again

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x) if self.again is None else RECOMPUTE[self.again](lambda t: self.inner(t))(x)

    def compute_output_shape(self, shape):
        return self.inner.compute_output_shape(shape)


def trained(name, again, *callbacks):
    keras.utils.set_random_seed(7)
    blocks = [Block(INNER[name](), again) for _ in range(2)]
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), *blocks, LAYERS.GlobalAveragePooling2D(), LAYERS.Dense(4)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("again", RECOMPUTE)
@pytest.mark.parametrize("name", INNER)
def test_the_same_bits_and_layers(name, again):
    plain, recomputed = (tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0) for _ in range(2))
    trained(name, None, plain)
    for stock, ours in zip(trained(name, again), trained(name, again, recomputed), strict=True):
        np.testing.assert_array_equal(ours, stock)
    assert recomputed.report.moved_ops
    assert len(recomputed.report.layers) == len(plain.report.layers)
