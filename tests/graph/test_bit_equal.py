"""The promise: the same bits after 20 steps, stock against rewritten, for what users train."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests import zoo, zoo_more
from tests.zoo import keras, needs_keras_3

EPOCHS, BATCH_SIZE = 10, 3  # two steps an epoch


def trained(build, optimizer: str = "adam", schedule: str | None = None, **compile_arguments):
    """Weights, optimizer state and losses after 20 steps, and the callback's report."""
    model, x, y = zoo.compiled(build, optimizer, **compile_arguments)
    callbacks = []
    if schedule is not None:
        callbacks = [tf_ooo.OOOBackprop(schedule=schedule, profile_steps=2, strict=True)]
    history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    state = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    return state, history.history["loss"], callbacks[0].report if callbacks else None


def assert_same_bits(build, optimizer: str = "adam", schedule: str = "fast_forward", **compile_arguments):
    stock, stock_losses, _ = trained(build, optimizer, **compile_arguments)
    ours, losses, report = trained(build, optimizer, schedule, **compile_arguments)
    assert not report.fell_back, report.fallback_reason
    assert report.rewritten_graph is not None
    assert losses == stock_losses
    assert len(ours) == len(stock)
    for a, b in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(a, b)
    return report


@pytest.mark.parametrize("name", zoo.SMALL)
def test_models(name):
    assert_same_bits(zoo.SMALL[name])


@pytest.mark.parametrize("name", zoo_more.MORE)
def test_more_models(name):
    assert_same_bits(zoo_more.MORE[name])


@needs_keras_3
def test_gan():
    """Two networks, two optimizers, fresh noise for each."""

    def trained_gan(callbacks):
        keras.utils.set_random_seed(7)
        model, x, y = zoo_more.gan()
        losses = model.fit(x, y, batch_size=3, epochs=10, verbose=0, callbacks=callbacks).history["loss"]
        slots = [v for optimizer in model.optimizers for v in optimizer.variables]
        return [losses, *(v.numpy() for v in (*model.variables, *slots))]

    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=2, strict=True)
    for a, b in zip(trained_gan([]), trained_gan([callback]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not callback.report.fell_back


@pytest.mark.parametrize(
    "optimizer",
    zoo.optimizers(*sorted(set(zoo.OPTIMIZERS) - {"adam"})),
)
def test_optimizers(optimizer):
    assert_same_bits(zoo.mlp, optimizer)


@pytest.mark.parametrize("name", ["convolutions", "lstm_gru", "residual"])
def test_in_order(name):
    assert_same_bits(zoo.SMALL[name], schedule="in_order")


@pytest.mark.parametrize("name", ["mlp", "lstm_gru"])
def test_several_steps_per_execution(name):
    assert_same_bits(zoo.SMALL[name], steps_per_execution=2)


def test_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        assert_same_bits(zoo.mlp)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("name", ["BertBackbone", "GPT2Backbone"])
@pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="keras-hub is not installed")
def test_transformers(name):
    assert_same_bits(lambda: zoo.backbone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MobileNetV3Small", "VGG16"])
def test_applications(name):
    assert_same_bits(lambda: zoo.application(name))


class Autoencoder(keras.Model):
    """A train_step of its own: two losses, clipping in the step, its own metric."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(5, activation="tanh")
        self.decoder = keras.layers.Dense(7)
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.decoder(self.encoder(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            code = self.encoder(x)
            rebuilt = tf.reduce_mean(tf.square(self.decoder(code) - x))
            loss = rebuilt + 0.1 * tf.reduce_mean(tf.abs(code))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "norm": norm}

    @property
    def metrics(self):
        return [self.tracker]


def test_custom_train_step():
    def build():
        model = Autoencoder()
        model.build((None, 7))
        return model, zoo.features(7), zoo.labels()

    assert_same_bits(build, metrics=None)


class Noisy(keras.Model):
    """Draws from TensorFlow's op-held random state, as many GAN and VAE scripts do."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Dense(9, activation="relu"), keras.layers.Dense(3)])
        self.inner.build((None, 7))

    def call(self, x):
        return self.inner(x + tf.random.normal(tf.shape(x)))


@pytest.mark.parametrize("schedule", ["auto", "fast_forward"])
def test_op_held_random_state_is_drawn_from_by_one_function_only(schedule):
    def build():
        return Noisy(), zoo.features(7), zoo.labels()

    stock, stock_losses, _ = trained(build)
    ours, losses, report = trained(build, schedule=schedule)
    assert losses == stock_losses
    for a, b in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(a, b)
    assert report.fell_back == (schedule == "auto")
    assert report.fell_back == ("random" in report.fallback_reason)
