"""Compiled steps of other forms: conditions, two updates in one step, no results."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from xla_steps import ASKED, assert_near, plain_step

import tf_ooo
from tests import zoo
from tf_ooo.compat import nests, tf_functions

pytestmark = zoo.needs_xla_streams


def assert_trains_as_stock(make, *given, calls=3):
    """``make()`` gives weights and a step; both ways of compiling it train them alike."""
    weights = []
    for decorate in (tf.function(jit_compile=True), tf_ooo.function(jit_compile=True, **ASKED)):
        variables, plain = make()
        step = decorate(plain)
        for _ in range(calls):
            step(*given)
        weights.append([variable.numpy() for variable in variables])
    assert_near(*weights)
    assert step.report.moved_ops
    return step


class TestAutograph:
    def test_conditions_and_loops_over_tensors(self):
        """Python's own words for them become ops, as in stock."""
        traced = []

        def make():
            model, plain, *_ = plain_step()

            def step(x, y):
                traced.append(x)
                if tf.reduce_mean(x) > 0.0:
                    x = x * 2.0
                total = tf.constant(0.0)
                for row in x:
                    total += tf.reduce_sum(row)
                return plain(x + 0.01 * total, y)

            return model.trainable_variables, step

        _, _, x, y = plain_step()
        for sign in (1.0, -1.0):
            assert_trains_as_stock(make, tf.constant(sign * np.abs(x)), tf.constant(y))
        assert len(traced) == 4, "once in stock, once to be rewritten"

    def test_a_tf_function_that_is_to_be_taken_as_it_is(self):
        """With ``autograph=False`` a condition over a tensor is the user's error in stock, too."""

        def step(x):
            return x if tf.reduce_mean(x) > 0.0 else -x

        ours = tf_ooo.function(tf.function(step, jit_compile=True, autograph=False), **ASKED)
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            ours(tf.constant([1.0]))

    def test_an_outer_switch_is_not_asked(self):
        """``fit`` traces with conversion switched off; a function of the user's own was to be converted."""

        @tf.function
        def halved(x):
            return x / 2.0 if tf.reduce_sum(x) > 0.0 else x

        inlined = tf_functions.undecorated(halved)
        outer = tf.function(tf.autograph.experimental.do_not_convert(lambda x: inlined(x)))
        assert outer(tf.constant(2.0)) == 1.0
        assert outer(tf.constant(-2.0)) == -2.0


def adversarial():
    """A step with two updates: the second one reads weights that the first one has written."""
    keras.utils.set_random_seed(1)
    generator = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(9, activation="tanh"),
            layers.Dense(8, activation="tanh"),
            layers.Dense(7),
        ]
    )
    critic = keras.Sequential(
        [
            keras.Input((7,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(6, activation="tanh"),
            layers.Dense(1),
        ]
    )
    optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)]
    for optimizer, model in zip(optimizers, (critic, generator), strict=True):
        optimizer.build(model.trainable_variables)

    def update(optimizer, model, tape, loss):
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def step(real, latent):
        with tf.GradientTape() as tape:
            told_apart = tf.reduce_mean(
                tf.nn.softplus(-critic(real)) + tf.nn.softplus(critic(generator(latent)))
            )
        update(optimizers[0], critic, tape, told_apart)
        with tf.GradientTape() as tape:
            taken_for_real = tf.reduce_mean(tf.nn.softplus(-critic(generator(latent))))
        update(optimizers[1], generator, tape, taken_for_real)
        return told_apart, taken_for_real

    return [*critic.trainable_variables, *generator.trainable_variables], step


class TestTwoUpdates:
    def test_weights_are_those_of_the_stock_step(self):
        given = [tf.constant(zoo.features(width)) for width in (7, 3)]
        step = assert_trains_as_stock(adversarial, *given)
        (compiled,) = step._step.rewritten._made.values()
        assert {call.wave for call in compiled.step_graph.calls} == {0, 1}
        joins = {
            node.name: set(node.input)
            for node in compiled.step_graph.graph_def.node
            if "ooo_join" in node.name
        }
        assert joins.keys() == {"ooo_join_0", "ooo_join_0_1"}
        for call in compiled.step_graph.calls:
            assert (call.name in joins["ooo_join_0"]) == (call.wave == 0)
            assert (call.name in joins["ooo_join_0_1"]) == (call.wave == 1)


class TestNoResult:
    def test_a_step_that_returns_nothing(self):
        def make():
            model, plain, *_ = plain_step()

            def step(x, y):
                plain(x, y)

            return model.trainable_variables, step

        _, _, x, y = plain_step()
        step = assert_trains_as_stock(make, tf.constant(x), tf.constant(y))
        assert step(tf.constant(x), tf.constant(y)) is None

    def test_it_is_waited_for_all_the_same(self, monkeypatch):
        waited = []
        monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: waited.append(True))
        nests.synchronize({"loss": tf.constant(1.0)})
        assert not waited
        nests.synchronize(None)
        assert waited == [True]
        tf.function(lambda: nests.synchronize(None))()
        assert waited == [True], "there is nothing to wait for while a function is traced"
