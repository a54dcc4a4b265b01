"""A generator and a critic with an optimizer each, in one ``train_step``, on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_models import normal
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(40), needs_keras_3]
X = normal(48, 7)


def network(last):
    hidden = [keras.layers.Dense(9, activation="tanh"), keras.layers.Dense(8, activation="tanh")]
    return keras.Sequential([keras.Input((7,)), *hidden, keras.layers.Dense(last)])


class Gan(keras.Model):
    """Adam for the generator, momentum for the critic."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(7), network(1)
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self):
        super().compile(jit_compile=False)
        self.of_generator = keras.optimizers.Adam(0.01)
        self.of_critic = keras.optimizers.SGD(0.1, momentum=0.9)
        self.of_generator.build(self.generator.trainable_variables)
        self.of_critic.build(self.critic.trainable_variables)

    def call(self, x):
        return self.critic(self.generator(x))

    def critic_loss(self, right, wrong):
        return self.entropy(tf.ones_like(right), right) + self.entropy(tf.zeros_like(wrong), wrong)

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape(persistent=True) as tape:
            wrong, right = self.critic(self.generator(real)), self.critic(real)
            fooled = self.entropy(tf.ones_like(wrong), wrong)
            found_out = self.critic_loss(right, wrong)
        of_critic, of_generator = self.critic.trainable_variables, self.generator.trainable_variables
        gradients = tape.gradient(found_out, of_critic), tape.gradient(fooled, of_generator)
        self.of_critic.apply(gradients[0], of_critic)
        self.of_generator.apply(gradients[1], of_generator)
        return {"generator": fooled, "critic": found_out}


class InTurns(Gan):
    """The generator's gradients are those of the critic that has just been updated."""

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = self.critic_loss(self.critic(real), self.critic(self.generator(real)))
        of_critic, of_generator = self.critic.trainable_variables, self.generator.trainable_variables
        self.of_critic.apply(tape.gradient(loss, of_critic), of_critic)
        with tf.GradientTape() as tape:
            answer = self.critic(self.generator(real))
            loss = self.entropy(tf.ones_like(answer), answer)
        self.of_generator.apply(tape.gradient(loss, of_generator), of_generator)
        return {"loss": loss}


def trained(make, schedule=None):
    """Its weights, and the report of the callback."""
    keras.utils.set_random_seed(3)
    model = make()
    model.compile()
    model(X[:2])
    callbacks = []
    if schedule is not None:
        options = tf_ooo.Pipeline(devices=2, microbatches=2, schedule=schedule, profile_steps=0)
        callbacks.append(tf_ooo.OOOBackprop(options))
    model.fit(X, X, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights(), callbacks[0].report if callbacks else None


def test_gradients_of_one_forward_pass():
    """All schedules have the same bits, those of one device up to rounding."""
    stock, _ = trained(Gan)
    weights = []
    for schedule in ("gpipe", "zb_h1", "zb_interleaved"):
        left, report = trained(Gan, schedule)
        assert report.planned.policy == schedule
        assert set(report.planned.device_of_stage) == {0, 1}
        weights.append(left)
    for left in weights:
        for ours, first, alone in zip(left, weights[0], stock, strict=True):
            np.testing.assert_array_equal(ours, first)
            np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-6)


def test_updates_in_turns_are_refused():
    with pytest.raises(BackendError, match="again after it has applied its gradient"):
        trained(InTurns, "gpipe")
