"""``tf_ooo.function`` takes what ``tf.function`` takes: partials, methods, objects that can be called."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras, needs_keras_3

pytestmark = needs_keras_3


class Training:
    def __init__(self):
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(9, "relu"), keras.layers.Dense(2)]
        )
        self.optimizer = keras.optimizers.SGD(0.1)
        self.optimizer.build(self.model.trainable_variables)

    def step(self, x, y, factor=1.0):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_mean((self.model(x) - y) ** 2)
        grads = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply(grads, self.model.trainable_variables)
        return loss

    def __call__(self, x, y):
        return self.step(x, y)


def twice(training, x, y, factor):
    return training.step(x, y, factor)


KINDS = {
    "partial": (lambda training: functools.partial(twice, training, factor=1.0), "twice"),
    "partial-of-partial": (
        lambda training: functools.partial(functools.partial(twice, factor=1.0), training),
        "twice",
    ),
    "object": (lambda training: training, "Training"),
    "method": (lambda training: training.step, "Training.step"),
    "lambda": (lambda training: lambda x, y: training.step(x, y), "<lambda>"),
}


@pytest.mark.parametrize("name", KINDS)
def test_trains_alike(name):
    make, called = KINDS[name]
    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    trained = []
    for decorate in (tf.function, tf_ooo.function(schedule="fast_forward", profile_steps=0)):
        training = Training()
        step = decorate(make(training))
        losses = [float(step(x, x[:, :2])) for _ in range(3)]
        trained.append([losses, *training.model.get_weights()])
    assert called in step.report.model
    assert step.report.moved_ops
    for stock, ours in zip(*trained, strict=True):
        np.testing.assert_array_equal(stock, ours)


def test_an_object_in_a_class():
    """A partial that is an attribute of a class is called as it is, as Python does."""
    training = Training()

    class Holder:
        step = tf_ooo.function(functools.partial(Training.step, training))

    assert np.isfinite(float(Holder().step(tf.ones((2, 6)), tf.ones((2, 2)))))


def test_a_step_within_another_function_says_so():
    training = Training()
    step = tf_ooo.function(training.step, schedule="fast_forward", profile_steps=0)
    outer = tf.function(lambda x, y: step(x, y), autograph=False)
    outer(tf.ones((2, 6)), tf.ones((2, 2)))
    assert "called inside another tf.function" in step.report.fallback_reason
