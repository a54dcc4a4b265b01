"""``mode="layerpipe"``: what is refused says why, has trained nothing, and leaves the model as it was."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.layerpipe_by_hand import same
from tests.graph.layerpipe_fit import (
    convnet,
    crossentropy,
    fitted,
    layerpipe,
    over_four,
    perceptron_batches,
    places,
    updates_of,
)
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.costs.table import CostTable

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(20)]


def assert_refused(model, text, train):
    """``train()`` raises an error with this text, and has changed nothing."""
    before = model.get_weights()
    with pytest.raises(tf_ooo.OOOError) as error:
        train()
    assert text in str(error.value)
    assert same(before, model.get_weights())
    assert updates_of(model) == 0
    assert places(model) == {"CPU:0"}


def planned(**options):
    """With costs: no step is needed for a plan."""
    return layerpipe(2, **options)


def profiled(**options):
    """The path that would measure a step first."""
    return tf_ooo.OOOBackprop(mode="layerpipe", devices=2, profile_steps=1, **options)


@pytest.mark.parametrize("way", [planned, profiled])
def test_clipping_by_global_norm(way):
    model = convnet(keras.optimizers.SGD(0.1, global_clipnorm=1.0))
    assert_refused(model, "clipping by global norm", lambda: fitted(model, way()))


# -- steps that cannot be spread -------------------------------------------------------------------


def compiled(optimizer=None, policy=None):
    """Two layers under a policy."""
    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(width, dtype=policy) for width in (3, 2)]
    model = keras.Sequential([keras.Input((12, 12, 2)), keras.layers.Flatten(), *dense])
    model.compile(optimizer or keras.optimizers.SGD(0.1), crossentropy(), jit_compile=False)
    return model


def with_loss_scale():
    scaled = getattr(keras.optimizers, "LossScaleOptimizer", None)
    scaled = scaled or keras.mixed_precision.LossScaleOptimizer
    return compiled(scaled(keras.optimizers.SGD(0.1)), "mixed_float16")


def with_accumulation():
    return compiled(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def overwritten():
    return compiled(keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))


CONDITIONS = [with_loss_scale, overwritten, *([with_accumulation] if KERAS_3 else [])]


@pytest.mark.parametrize("make", CONDITIONS)
def test_optimizers_with_conditions(make):
    text = "without loss scaling, gradient_accumulation_steps= and ema_overwrite_"
    model = make()
    assert_refused(model, text, lambda: fitted(model, layerpipe(layers=2)))


def test_loss_scaling_is_refused_before_a_step_is_measured():
    model = with_loss_scale()
    assert_refused(model, "without loss scaling", lambda: fitted(model, profiled()))


class Gated(keras.layers.Layer):
    """A condition on what weights have computed."""

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: 2.0 * x, lambda: x)


def test_conditions_on_what_weights_compute():
    layers = [keras.layers.Flatten(), keras.layers.Dense(5), Gated(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((12, 12, 2)), *layers])
    model.compile("sgd", crossentropy(), jit_compile=False)
    text = "layer 'gated' (Gated) has a condition on tensors (tf.cond, ops.cond;"
    assert_refused(model, text, lambda: fitted(model, profiled()))


@needs_keras_3  # that of Keras 2 fails in fit
def test_a_layers_own_condition_on_its_weights():
    """It was told to do without loss scaling, which it has not."""
    spectral = keras.layers.SpectralNormalization(keras.layers.Conv2D(3, 3), name="spectral")
    layers = [spectral, keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((12, 12, 2)), *layers])
    model.compile("sgd", crossentropy(), jit_compile=False)
    text = "layer 'spectral' (SpectralNormalization) has a condition on tensors (tf.cond, ops.cond;"
    assert_refused(model, text, lambda: fitted(model, profiled()))
    with pytest.raises(tf_ooo.OOOError, match="leave that condition out") as raised:
        fitted(model, profiled())
    assert "loss scaling" not in str(raised.value)


@pytest.mark.parametrize("options", [{"profile_steps": 0}, {"profile_steps": 1}])
def test_loops(options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.LSTM(5, name="lstm"), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((32, 6, 4), np.float32), np.ones((32, 2), np.float32)
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, **options)

    def train():
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])

    assert_refused(model, "layer 'lstm' (LSTM) has a loop", train)
    with pytest.raises(tf_ooo.OOOError, match="unroll=True, or train with mode='pipeline'"):
        train()


# -- steps of a model's own ------------------------------------------------------------------------


class Looping(keras.Sequential):
    """Computes its loss in a loop on tensors."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            square = tf.reduce_mean(tf.square(self(x) - y))
            _, loss = tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + square), (0, 0.0))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_a_loop_of_train_step_is_no_layers():
    model = Looping([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    model.compile("sgd", jit_compile=False)
    x, y = np.ones((32, 4), np.float32), np.ones((32, 2), np.float32)
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, profile_steps=0)
    with pytest.raises(tf_ooo.OOOError, match="take it out of train_step.*train on one device"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])


class Twice(keras.Sequential):
    """Applies gradients twice with one optimizer, each time half of them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = list(zip(gradients, self.trainable_variables, strict=True))
        self.optimizer.apply_gradients(pairs[:4])
        self.optimizer.apply_gradients(pairs[4:])
        return {"loss": loss}


class Adversary(keras.Sequential):
    """Updates the upper half, then reads it again."""

    def train_step(self, data):
        x, y = data
        low, high = self.trainable_variables[:4], self.trainable_variables[4:]
        for optimizer, variables in ((self.optimizer, high), (self.second, low)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


class SharpnessAware(keras.Sequential):
    """Takes the gradient where the weights are moved by all gradients (Foret et al. 2021)."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, variables)
        moves = [0.05 * gradient / tf.linalg.global_norm(gradients) for gradient in gradients]
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_add(move)
        with tf.GradientTape() as tape:
            moved_loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(moved_loss, variables)
        for variable, move in zip(variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


class ByHand(keras.Sequential):
    """Updates its weights without an optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        variables = self.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign(variable - 0.1 * gradient)
        return {"loss": loss}


def of_kind(kind):
    model = kind([keras.Input((20,)), *(keras.layers.Dense(w) for w in (17, 12, 9, 4))])
    model.second = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.second.build(model.trainable_variables[:4])
    return model


STEPS = {
    Twice: "applies gradients twice with one optimizer",
    Adversary: "again after it has applied",
    SharpnessAware: "what needs all gradients at once",
    ByHand: "applies no gradient",
}


@pytest.mark.parametrize("options", [{}, {"costs": None, "profile_steps": 1}], ids=["costs", "profiled"])
@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.__name__)
def test_steps_that_devices_would_change(kind, options):
    model = of_kind(kind)

    def train():
        model.fit(perceptron_batches(), verbose=0, callbacks=[over_four(**options)])

    assert_refused(model, STEPS[kind], train)


# -- options and data ------------------------------------------------------------------------------


def test_more_processors_than_tasks():
    layers = [keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((12, 12, 2)), *layers])
    model.compile("sgd", crossentropy(), jit_compile=False)
    callback = tf_ooo.OOOBackprop(
        mode="layerpipe", devices=4, costs=CostTable([tf_ooo.LayerCosts(1.0, 0.0, 0.0)])
    )
    text = "4 processors are more than the tasks of 1 layers"
    assert_refused(model, text, lambda: fitted(model, callback))


def test_more_devices_than_there_are():
    model = convnet()
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=9)
    assert_refused(model, "devices=9", lambda: fitted(model, callback))


def test_drain_steps_within_an_execution():
    model = convnet()
    model.compile("sgd", model.loss, jit_compile=False, steps_per_execution=3)
    text = "drain_steps=4 is no multiple of steps_per_execution=3"
    assert_refused(model, text, lambda: fitted(model, layerpipe(drain_steps=4)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "layerpipe", "schedule": "zb_v"}, "'layerpipe'"),
        ({"mode": "pipeline", "weights": "ema"}, "needs mode='layerpipe'"),
    ],
)
def test_options_of_other_modes(options, text):
    with pytest.raises(tf_ooo.OOOError, match=text):
        tf_ooo.OOOBackprop(**options)


def test_batches_of_unequal_lengths():
    """Words of 6, 6, 5 ... places: refused when the third comes."""
    layers = [keras.layers.Embedding(29, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *layers])
    model.compile("sgd", crossentropy(), jit_compile=False)
    lengths = (6, 6, 5, 6, 6, 6)
    batches = tf.data.Dataset.from_generator(
        lambda: ((np.ones((8, n), np.int32), np.ones(8, np.int32)) for n in lengths),
        output_signature=(tf.TensorSpec([8, None], tf.int32), tf.TensorSpec([8], tf.int32)),
    )
    with pytest.raises(tf_ooo.OOOError, match="batches of one kind"):
        model.fit(batches, verbose=0, callbacks=[layerpipe(2, 2)])
    assert places(model) == {"CPU:0"}
