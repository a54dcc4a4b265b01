"""Fits whose batches all differ in size: the fourth size and all that follow share one trace."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import Training, assert_equal_bits, distance, pipelined
from tests.graph.pipeline_models import Positions, X, Y, adam, batch_normalized, mlp, momentum, whole
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(60), needs_keras_3]
# Normalized rows have to be several; 2 are fewer than the micro-batches, and traced by themselves.
SIZES = [48, 36, 46, 34, 2, 40]
# Parts of 48 rows, of 36, of 46 in 16 and 15, of all others, and of 2 rows: six kinds of graphs.  Sizes that
# share nothing have two for 34 rows and two for 40.
SHARED, ALONE = 1 + 1 + 2 + 1 + 1, 1 + 1 + 2 + 2 + 1 + 2
layers = keras.layers


def batches(*arrays, sizes=SIZES):
    """A dataset of batches of these sizes."""

    def cut():
        begin = 0
        for size in sizes:
            yield tf.nest.map_structure(
                lambda rows, a=begin, b=begin + size: np.resize(rows, (300, *rows.shape[1:]))[a:b], arrays
            )
            begin += size

    spec = tf.nest.map_structure(lambda rows: tf.TensorSpec([None, *rows.shape[1:]], rows.dtype), arrays)
    return tf.data.Dataset.from_generator(cut, output_signature=spec)


def dropping():
    """Numbers are drawn from a state that is a variable: which rows of a batch are dropped depends on it."""
    parts = [layers.Dense(12, activation="gelu"), layers.Dropout(0.3, seed=5), layers.Dense(9)]
    return keras.Sequential([keras.Input((7,)), *parts, layers.Dense(3)])


def two_inputs():
    a, b = keras.Input((7,)), keras.Input((6,), dtype="int32")
    rows = layers.Flatten()(layers.Embedding(9, 5)(b))
    x = layers.Dense(12, activation="relu")(layers.Concatenate()([layers.Dense(11)(a), rows]))
    return keras.Model([a, b], layers.Dense(3)(layers.Dense(10)(x)))


class OfShapes(Positions):
    """Takes positions from the shape of the batch, that only a trace with its rows knows."""

    def call(self, x):
        return self.tokens(x) + self.positions(tf.range(tf.shape(x)[1]))


def places():
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Dense(9, activation="relu")(layers.Flatten()(OfShapes()(inputs)))
    return keras.Model(inputs, layers.Dense(3)(x))


class NeedsRows(keras.Model):
    """Its train_step asks for the number of rows, which a trace of any number does not know."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x, training=True) - tf.one_hot(y, 3))
            loss = tf.reduce_sum(errors) / (3 * int(x.shape[0]))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Tracked(keras.Model):
    """Gives a ``Mean`` of its own the loss of each batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.one_hot(y, 3)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def small(kind):
    inputs = keras.Input((7,))
    return kind(inputs, layers.Dense(3)(layers.Dense(12, activation="relu")(inputs)))


WEIGHTS = np.linspace(0.2, 2.0, 48, dtype="float32")
CASES = {
    "batch_normalized": (batch_normalized, momentum, (X, Y), {}),
    "dropping": (dropping, momentum, (X, Y), {}),
    "two_inputs": (two_inputs, momentum, ((X, whole(9, 48, 6).astype("int32")), Y, WEIGHTS), {}),
    "tracked": (lambda: small(Tracked), adam, (X, Y), {}),
    "executions": (mlp, adam, (X, Y), {"steps_per_execution": 2}),
}


class Fits:
    """Fits of one model from the same beginning, on these batches, and how often a part was traced."""

    def __init__(self, make, optimizer, data, compiled, sizes=SIZES):
        self.training = Training(make, optimizer, (batches(*data, sizes=sizes),), epochs=1, **compiled)
        self.traced = 0

    def fit(self, *callbacks, **settings):
        model, self.traced = self.training.model, 0
        self.training.restore()
        train_step = model.train_step

        def counted(data):
            self.traced += 1
            return train_step(data)

        model.train_step = counted
        history = model.fit(
            self.training.data[0], epochs=1, verbose=0, callbacks=list(callbacks), **settings
        ).history
        del model.train_step
        return self.training.left(history)


def piped(schedule, **options):
    return pipelined(schedule, **{"devices": 2, "microbatches": 3, "check_loss": False} | options)


@functools.cache
def sharing(case):
    """Return the fits of a case, and what the first left, in which sizes shared a trace."""
    fits = Fits(*CASES[case])
    fitted = fits.fit(piped("1f1b"))
    assert fits.traced == SHARED
    return fits, fitted


@pytest.mark.parametrize("case", CASES)
def test_sizes_that_differ(case, monkeypatch):
    """Stock leaves the same, or, if numbers depend on micro-batches, a trace for each size does."""
    fits, shared = sharing(case)
    if case in ("two_inputs", "executions"):
        each = fits.fit()
    else:  # stock's averages and masks are those of batches, and its ``Mean`` counts a step without a batch
        monkeypatch.setattr("tf_ooo.tracing.micro_batches.OWN_TRACES", 99)
        each = fits.fit(piped("1f1b"))
        assert fits.traced == ALONE
    assert distance(fits.training.untrained, each.weights) > 1e-3
    assert distance(each.weights, shared.weights) < 1e-5
    assert shared.history["loss"] == pytest.approx(each.history["loss"], rel=1e-5)
    assert shared.history.get("accuracy") == each.history.get("accuracy")


def test_all_schedules_share_alike():
    """Whichever steps are on one device: what counts is which batches the fit has had."""
    fits, shared = sharing("dropping")
    again = fits.fit(piped("zb_h1", profile_steps=1))
    assert_equal_bits(shared.weights, again.weights)
    assert_equal_bits(shared.state, again.state)


def test_class_weights_and_replicas():
    fits = Fits(mlp, adam, (X, Y), {})
    settings = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    stock = fits.fit(**settings)
    fitted = fits.fit(pipelined("1f1b", devices=4, replicas=2), **settings)
    assert fits.traced == SHARED + 2  # a micro-batch is looked at, and two in one, before the first step
    assert distance(stock.weights, fitted.weights) < 1e-4


@pytest.mark.parametrize(
    ("make", "data", "compiled"),
    [
        pytest.param(lambda: small(NeedsRows), (X, Y), {"loss": None, "metrics": None}, id="train_step"),
        pytest.param(places, (whole(50, 48, 7).astype("int32"), Y), {}, id="positions"),
    ],
)
def test_what_needs_the_rows_is_traced_with_them(make, data, compiled):
    fits = Fits(make, adam, data, compiled)
    fitted = fits.fit(piped("1f1b"))
    assert fits.traced >= ALONE
    assert np.isfinite(fitted.history["loss"]).all()
    if make is places:
        assert distance(fits.fit().weights, fitted.weights) < 1e-3


def test_a_memory_limit_needs_the_rows():
    fits = Fits(mlp, adam, (X, Y), {})
    fits.fit(piped("auto", memory_limit_bytes=1 << 30))
    assert fits.traced == ALONE
