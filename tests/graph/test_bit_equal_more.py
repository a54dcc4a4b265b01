"""The same bits for trainings with several optimizers, losses and weights of samples."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_ooo
from tests import zoo
from tests.zoo import needs_keras_3


class GAN(keras.Model):
    """Two networks, two optimizers, one step."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(9, activation="relu"), layers.Dense(7)]
        )
        self.critic = keras.Sequential(
            [keras.Input((7,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, own, critics):
        super().compile(jit_compile=False)
        self.own, self.critics = own, critics
        own.build(self.generator.trainable_variables)
        critics.build(self.critic.trainable_variables)

    def call(self, x):
        return self.critic(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        noise = keras.random.normal((tf.shape(data)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(noise)) - self.critic(data))
        weights = self.critic.trainable_variables
        self.critics.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fooled = -tf.reduce_mean(self.critic(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.own.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
        self.tracker.update_state(loss + fooled)
        return {"loss": self.tracker.result()}


def gan():
    keras.utils.set_random_seed(7)
    model = GAN()
    model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.SGD(1e-2, momentum=0.9))
    return model, {"x": zoo.features(7)}


def two_outputs(**weights):
    keras.utils.set_random_seed(7)
    inputs = keras.Input((7,))
    shared = layers.Dense(9, activation="relu")(inputs)
    outputs = {"kind": layers.Dense(3, name="kind")(shared), "size": layers.Dense(1, name="size")(shared)}
    model = keras.Model(inputs, outputs)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile("adam", losses, loss_weights={"kind": 1.0, "size": 0.3}, jit_compile=False)
    return model, {"x": zoo.features(7), "y": {"kind": zoo.labels(), "size": zoo.features(1)}, **weights}


def with_sample_weight():
    rows = np.linspace(0.1, 2.0, zoo.BATCH).astype("float32")
    return two_outputs(sample_weight={"kind": rows, "size": rows[::-1].copy()})


@pytest.mark.parametrize("build", [pytest.param(gan, marks=needs_keras_3), two_outputs, with_sample_weight])
@pytest.mark.parametrize("schedule", ["auto", "fast_forward"])
def test_same_bits(build, schedule):
    trained = []
    callback = tf_ooo.OOOBackprop(schedule=schedule, profile_steps=2, strict=True)
    for callbacks in ([], [callback]):
        model, data = build()
        history = model.fit(**data, batch_size=3, epochs=10, verbose=0, callbacks=callbacks)
        trained.append((history.history["loss"], model.get_weights()))
    (stock_losses, stock), (losses, ours) = trained
    assert losses == stock_losses
    for a, b in zip(ours, stock, strict=True):
        np.testing.assert_array_equal(a, b)
    assert callback.report.rewritten_graph is not None
    assert callback.report.ops["dW"] > 0


@needs_keras_3  # Keras 2's Dropout draws from a state that each function has of its own
def test_a_pass_that_fails_on_a_retrace_of_fit(monkeypatch, caplog):
    """The same callback, batches of another fixed size: planned again, which fails from then on."""
    from grappler_passes.order import OrderPass

    run, failing, trained = OrderPass.run, [], []

    def late(self, graph_def, training_graph):
        if failing:
            raise ValueError("late boom")
        return run(self, graph_def, training_graph)

    monkeypatch.setattr(OrderPass, "run", late)
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0)
    for callbacks in ([], [callback]):
        failing.clear()
        model, x, y = zoo.compiled(zoo.mlp)
        data = tf.data.Dataset.from_tensor_slices((x, y)).repeat(4)
        for size in (2, 3):
            batches = data.batch(size, drop_remainder=True)
            model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
            failing.append(size)
        trained.append(model.get_weights())
    for a, b in zip(*trained, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "late boom" in callback.report.fallback_reason
    assert len([r for r in caplog.records if "late boom" in r.getMessage()]) == 1
