"""Rows that look at each other are refused, wherever they do; other models train as stock trains them."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from keras_callbacks import OOOBackprop
from tests.graph.pipeline_fits import assert_equal_bits, pipelined
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError
from tf_ooo.modes.pipeline import looked_at
from tf_ooo.modes.pipeline.comparing import Comparison

pytestmark = [pytest.mark.devices(2), needs_keras_3]

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
Y = X[:, :2] * 0.5


def between(*layers):
    """A functional model with some layers in its middle."""
    inputs = keras.Input((6,))
    out = keras.layers.Dense(8, "tanh")(inputs)
    for layer in layers:
        out = layer(out)
    return keras.Model(inputs, keras.layers.Dense(2)(out))


def of_ops():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden - keras.ops.mean(hidden, 0, keepdims=True)))


class Called(keras.Model):
    """Its ``call`` does something with all rows."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = keras.layers.Dense(8, "tanh"), keras.layers.Dense(2), change

    def call(self, x):
        return self.last(self.change(self.first(x)))


class Gated(keras.layers.Layer):
    """Compares rows behind a gate of zero, so that the first step does not show it."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(1,), initializer="zeros", name="gate")

    def call(self, x):
        return x + self.gate * keras.ops.softmax(x, 0)


class OwnStep(keras.Model):
    """Its train_step may mix rows, and multiply gradients by a number."""

    def mixed(self, x):
        return x

    def factor(self, x, loss):
        return 1.0

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(self.mixed(x), training=True) - y) ** 2)
        factor = self.factor(x, loss)
        grads = [grad * factor for grad in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


class MixUp(OwnStep):
    def mixed(self, x):
        return 0.7 * x + 0.3 * tf.random.shuffle(x)


class ByLoss(OwnStep):
    def factor(self, x, loss):
        return tf.minimum(1.0, 100.0 / loss)  # 1 in the first steps


class ByShape(OwnStep):
    def factor(self, x, loss):
        return 1.0 / tf.cast(tf.shape(x)[1], tf.float32)


def own(kind):
    inputs = keras.Input((6,))
    return kind(inputs, keras.layers.Dense(2)(keras.layers.Dense(8, "tanh")(inputs)))


def variance(factor):
    return lambda y, p: tf.reduce_mean((y - p) ** 2) + factor * tf.math.reduce_variance(p, 0)[0]


def fit(model, *callbacks, loss="mse", optimizer=None):
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
    model(X[:1])
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model.get_weights()


REFUSED = {
    "layer-softmax": (lambda: between(keras.layers.Softmax(axis=0)), "softmax"),
    "layer-unit": (lambda: between(keras.layers.UnitNormalization(axis=0)), "unit_normalization"),
    "lambda-sum": (lambda: between(keras.layers.Lambda(lambda h: h / tf.reduce_sum(h**2))), "lambda"),
    "lambda-cumulative": (lambda: between(keras.layers.Lambda(lambda h: tf.cumsum(h))), "lambda"),
    "lambda-sort": (lambda: between(keras.layers.Lambda(lambda h: tf.sort(h, 0))), "lambda"),
    "ops": (of_ops, "rows first meet at op functional"),
    "call": (lambda: Called(lambda h: tf.nn.softmax(h, 0)), "op called"),
    "call-roll": (lambda: Called(lambda h: h + 0.01 * tf.roll(h, 1, 0)), "op called"),
    "attention": (lambda: Called(lambda h: tf.nn.softmax(h @ tf.transpose(h)) @ h), "op called"),
    "call-known": (
        lambda: Called(lambda h: h if h.shape[0] is None else h - tf.reduce_mean(h, 0)),
        "op called",
    ),
    "gate": (lambda: between(Gated()), "gated"),
    "mixup": (lambda: own(MixUp), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_look_at_each_other(name):
    keras.utils.set_random_seed(1)
    make, place = REFUSED[name]
    model = make()
    model(X[:1])
    before = model.get_weights()
    with pytest.raises(BackendError, match="compares rows with one another") as raised:
        fit(model, pipelined("gpipe", devices=2, microbatches=4))
    assert_equal_bits(before, model.get_weights())
    assert place in str(raised.value)
    assert "microbatches=1" in str(raised.value)


def test_what_only_an_optimized_graph_runs_is_looked_at_as_well(monkeypatch):
    @contextlib.contextmanager
    def cannot():
        yield
        raise tf.errors.UnimplementedError(None, None, "no kernel")

    monkeypatch.setattr(looked_at.runtime, "calls_not_optimized", cannot)
    with pytest.raises(BackendError, match="compares rows with one another"):
        fit(between(keras.layers.Softmax(axis=0)), pipelined("gpipe", devices=2, microbatches=4))


def test_the_place_is_right_with_one_row_in_each():
    """With one row ``x + bias`` is the name of another op in an LSTM's cell."""
    inputs = keras.Input((6,))
    hidden = keras.layers.LSTM(4)(keras.layers.Reshape((3, 2))(inputs))
    hidden = keras.layers.Lambda(lambda h: h + keras.ops.sort(h, axis=0))(hidden)
    with pytest.raises(BackendError, match="rows first meet at layer 'lambda"):
        fit(
            keras.Model(inputs, keras.layers.Dense(2)(hidden)), pipelined("gpipe", devices=2, microbatches=16)
        )


@pytest.mark.parametrize("factor", [1.0, 1e-2, 2e-3])
def test_a_small_term_of_the_loss(factor):
    keras.utils.set_random_seed(1)
    with pytest.raises(BackendError, match="gradients of two micro-batches|loss of two micro-batches"):
        fit(between(), pipelined("gpipe", devices=2, microbatches=2), loss=variance(factor))


def test_gradients_that_the_batch_scales():
    keras.utils.set_random_seed(1)
    with pytest.raises(BackendError, match="multiplies gradients by a number of the batch"):
        fit(own(ByLoss), pipelined("gpipe", devices=2, microbatches=4))


def masked():
    inputs = keras.Input((6,))
    hidden = keras.layers.Masking()(keras.layers.Reshape((3, 2))(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.LSTM(4)(hidden)))


class Sampled(keras.layers.Layer):
    """Random numbers that do nothing to the weights, but are drawn."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 0.0 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


TRAINED = {
    "plain": between,
    "layer-normalization": lambda: between(keras.layers.LayerNormalization(), keras.layers.Softmax()),
    "masks": masked,
    "random": lambda: between(Sampled()),
    "scaled": lambda: own(ByShape),
    "embedding": lambda: between(
        keras.layers.Lambda(lambda h: tf.cast(tf.abs(h) * 5, tf.int32)),
        keras.layers.Embedding(6, 3),
        keras.layers.Flatten(),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_rows_by_themselves(name):
    """The weights are those of stock, up to rounding."""
    trained = []
    for callbacks in ((), (pipelined("gpipe", devices=2, microbatches=4),)):
        keras.utils.set_random_seed(1)
        trained.append(fit(TRAINED[name](), *callbacks))
    for stock, parts in zip(*trained, strict=True):
        np.testing.assert_allclose(parts, stock, rtol=1e-4, atol=1e-6)


class Disturbing(OwnStep):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        grads = [grad + 0.0 * tf.random.normal(grad.shape) for grad in grads]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}


class Looping(OwnStep):
    def train_step(self, data):
        def update(count):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return [count + 1]

        (count,) = tf.while_loop(lambda count: count < 2, update, [tf.constant(0)])
        return {"updates": count}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: between(keras.layers.Softmax(axis=0)), "compares rows"),
        (lambda: own(Disturbing), "changes gradients"),
        (lambda: own(Looping), "inside a loop"),
    ],
    ids=["rows", "disturbing", "loop"],
)
def test_it_stays_on_one_device_where_it_may(make, reason):
    """A callback that only offers devices trains such a model as stock does."""
    trained = []
    for ours in ({}, {"devices": 2, "compare": True, "profile_steps": 1}):
        keras.utils.set_random_seed(1)
        model, callbacks = make(), [OOOBackprop(**ours)] if ours else []
        model(X[:1])
        model.optimizer = keras.optimizers.SGD(0.1)
        model.optimizer.build(model.trainable_variables)
        trained.append(fit(model, *callbacks, optimizer=model.optimizer))
    assert_equal_bits(*trained)
    assert reason in callbacks[0].report.fallback_reason


@pytest.mark.parametrize("mixes", [False, True])
def test_wide_layers_have_units_on_the_edge_of_a_relu(mixes):
    """Rounding in a product of another shape turns units on or off: gradients change by a thousandth."""

    def loss(y, out):
        rows = tf.reduce_mean(tf.square(y - out), -1)
        return rows + 0.01 * tf.math.reduce_variance(rows) if mixes else rows

    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(1280, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((1280,)), *hidden, keras.layers.Dense(4)])
    model.compile("sgd", loss, jit_compile=False)
    numbers = np.random.default_rng(0)
    batch = tuple(tf.constant(numbers.normal(size=(1536, width)), tf.float32) for width in (1280, 4))
    comparison = Comparison(model, batch, 768, True, lambda seconds: None)
    said = comparison.difference_of(comparison.pairs_of(batch))
    assert bool(said) == mixes, said
