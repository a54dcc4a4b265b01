"""A generator and a critic with an optimizer each, in one ``train_step``, on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import assert_equal_bits
from tests.graph.pipeline_graphs import Rewritten
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
    """The critic is updated, ``times``, then the generator by what the critic says now."""

    times = 1

    def compile(self):
        super().compile()
        self.of_both = [keras.metrics.Mean(name=name) for name in ("critic", "generator")]

    @property
    def metrics(self):
        return self.of_both

    def noise(self, real, first):
        """What the generator is given."""
        return real

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        of_critic, of_generator = self.critic.trainable_variables, self.generator.trainable_variables
        for _ in range(self.times):
            with tf.GradientTape() as tape:
                fake = self.generator(self.noise(real, True))
                loss = self.critic_loss(self.critic(real), self.critic(fake))
            self.of_critic.apply(tape.gradient(loss, of_critic), of_critic)
        self.of_both[0].update_state(loss)
        with tf.GradientTape() as tape:
            answer = self.critic(self.generator(self.noise(real, False)))
            loss = self.entropy(tf.ones_like(answer), answer)
        self.of_generator.apply_gradients(zip(tape.gradient(loss, of_generator), of_generator, strict=True))
        self.of_both[1].update_state(loss)
        return {metric.name: metric.result() for metric in self.of_both}


class CriticTwice(InTurns):
    """As of Wasserstein GANs: several updates by one optimizer."""

    times = 2


class Noise(InTurns):
    """Random numbers of both kinds: of a kernel's state, and of a seed in a variable."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def noise(self, real, first):
        return (
            tf.random.normal(tf.shape(real)) if first else keras.random.normal(tf.shape(real), seed=self.seed)
        )


class LooksAgain(InTurns):
    """Its logs are those of all updated weights."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"answer": tf.reduce_mean(self(data[0]))}


class Averaged(InTurns):
    """Keeps a moving average of the generator's weights."""

    def compile(self):
        super().compile()
        self.means = [keras.Variable(tf.zeros(v.shape)) for v in self.generator.trainable_variables]

    def train_step(self, data):
        logs = super().train_step(data)
        for mean, variable in zip(self.means, self.generator.trainable_variables, strict=True):
            mean.assign(0.9 * mean + 0.1 * variable)
        return logs


def trained(make, schedule=None, rows=48, **options):
    """Its weights, its history and the report of the callback."""
    keras.utils.set_random_seed(3)
    model = make()
    model.compile()
    model(X[:2])
    callbacks = []
    if schedule is not None:
        options = {"devices": 2, "microbatches": 2, "profile_steps": 0} | options
        callbacks.append(tf_ooo.OOOBackprop(tf_ooo.Pipeline(schedule=schedule, **options)))
    history = model.fit(
        X[:rows], X[:rows], batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks
    )
    return model.get_weights(), history.history, callbacks[0].report if callbacks else None


def assert_near(arrays, others):
    for ours, alone in zip(arrays, others, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [Gan, InTurns, CriticTwice, LooksAgain])
def test_all_schedules_have_the_same_bits(make):
    """Those of one device up to rounding."""
    stock, history, _ = trained(make)
    weights = []
    for schedule in ("gpipe", "zb_h1", "zb_interleaved"):
        left, logs, report = trained(make, schedule)
        assert report.planned.policy == schedule
        assert set(report.planned.device_of_stage) == {0, 1}
        assert Rewritten(report).unordered() == []
        assert not any("wait for each other" in note for note in report.notes)
        weights.append(left)
        assert_near(left, stock)
        assert_near([logs[name] for name in history], history.values())
    for left in weights:
        assert_equal_bits(left, weights[0])


def test_turns_are_one_after_the_other():
    _, _, report = trained(InTurns, "zb_h1")
    (said,) = (note for note in report.notes if "turns" in note)
    assert "in 2 turns" in said
    tasks = set(Rewritten(report).tasks.values())
    assert {task.microbatch for task in tasks if task.kind == "F"} == {0, 1, 2, 3}
    layers = [row.name for row in report.layers]
    of_generator = [name.split("/")[0] == layers[0].split("/")[0] for name in layers]
    assert of_generator == sorted(of_generator, reverse=True), "the generator's layers come first"


@pytest.mark.parametrize(
    "options",
    [{"microbatches": 1}, {"microbatches": 4}, {"recompute": "all"}, {"first_steps": "cut"}],
    ids=str,
)
def test_in_turns(options):
    stock, history, _ = trained(InTurns)
    left, logs, _ = trained(InTurns, "zb_h1", **options)
    assert_near(left, stock)
    assert_near(logs.values(), history.values())


@pytest.mark.devices(4)
def test_replicas_in_turns():
    """Each replica's lanes are in order, in both turns."""
    stock, _, _ = trained(InTurns)
    fits = [trained(InTurns, name, devices=4, microbatches=4, replicas=2) for name in ("gpipe", "zb_h1")]
    for left, _, report in fits:
        assert_near(left, stock)
        assert_equal_bits(left, fits[0][0])
        assert not any("wait for each other" in note for note in report.notes)


@pytest.mark.parametrize(("rows", "microbatches"), [(41, 2), (48, 3)], ids=["at the end", "always"])
def test_micro_batches_of_different_sizes_in_turns(rows, microbatches):
    """They are traced for any number of rows, as copies."""
    stock, _, _ = trained(InTurns, rows=rows)
    left, _, _ = trained(InTurns, "zb_h1", rows, microbatches=microbatches)
    assert_near(left, stock)


def test_micro_batches_in_turns_draw_different_numbers():
    fits = [trained(Noise, schedule) for schedule in ("gpipe", "zb_h1")]
    assert_equal_bits(fits[0][0], fits[1][0])
    graph = fits[0][2].rewritten_graph
    seeds = [node.attr["seed2"].i for node in graph.node if node.op == "RandomStandardNormal"]
    assert len(seeds) == len(set(seeds)) == 2


def test_a_state_that_follows_updated_weights_is_refused():
    """Each micro-batch would change it."""
    with pytest.raises(BackendError, match="each of 2 micro-batches would do so"):
        trained(Averaged, "gpipe")
    stock, _, _ = trained(Averaged)
    assert_near(trained(Averaged, "gpipe", microbatches=1)[0], stock)
