"""Micro-batches against a loop of TensorFlow and Keras alone, on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import Training, assert_same_bits, fits_of
from tests.graph.pipeline_models import (
    EVEN,
    TWO_TEXTS,
    UNEVEN,
    WORDS,
    X,
    Y,
    batch_normalized,
    mlp,
    momentum,
    siamese,
    two_inputs,
)
from tests.zoo import KERAS_3, keras, loss_scaling, needs_keras_3

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(30)]


def rows_of_parts(rows, count=4):
    """Divide rows as docs/details/pipeline.md says: as equal as can be, larger ones first, none empty."""
    count = min(rows, count)
    return [rows // count + (number < rows % count) for number in range(count)]


def trained_by_hand(training):
    """Weights, optimizer state and the loss of each epoch after a loop over micro-batches.

    Of each micro-batch the mean loss and its gradient; then one update with the mean over the batch's rows.
    """
    model, optimizer = training.model, training.model.optimizer
    weights = model.trainable_variables

    # A function, so that TensorFlow merges the same ops as in a step.
    @tf.function
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.loss(y, outputs)
            for penalty in model.losses:
                loss += tf.cast(penalty, loss.dtype)
            scaled = scaling(optimizer)(loss)
        return loss, list(map(tf.convert_to_tensor, tape.gradient(scaled, weights)))  # a table's too

    training.restore()
    losses = []
    for _ in range(training.epochs):
        total = 0.0
        for begin in range(0, len(training.data[1]), training.batch_size):
            x, y = rows_between(training.data, begin, begin + training.batch_size)
            sums, first, averages = [0.0] * len(weights), 0, Averages(model, len(y))
            for rows in rows_of_parts(len(y)):
                loss, gradients = gradients_of(*rows_between((x, y), first, first + rows))
                averages.take(rows)
                sums = [sum_ + gradient * rows for sum_, gradient in zip(sums, gradients, strict=True)]
                total, first = total + float(loss) * rows, first + rows
            averages.assign()
            means = unscaling(optimizer)([rounding(optimizer)(sum_ / len(y)) for sum_ in sums])
            optimizer.apply_gradients(zip(means, weights, strict=True))
        losses.append(total / len(training.data[1]))
    return training.left(), losses


class Averages:
    """Moving averages of batch normalization: once for a batch, of the mean and the variance of its rows."""

    def __init__(self, model, rows):
        kind = keras.layers.BatchNormalization
        self.layers = [layer for layer in model.layers if isinstance(layer, kind)]
        self.before = [(layer.moving_mean.numpy(), layer.moving_variance.numpy()) for layer in self.layers]
        self.batch_rows, self.parts = rows, [[] for _ in self.layers]

    def take(self, rows):
        """Take what a micro-batch has made of them, and put them back."""
        for layer, before, parts in zip(self.layers, self.before, self.parts, strict=True):
            mean, variance = (
                (new.numpy() - layer.momentum * old) / (1.0 - layer.momentum)
                for new, old in zip((layer.moving_mean, layer.moving_variance), before, strict=True)
            )
            parts.append((rows / self.batch_rows, mean, variance))
            layer.moving_mean.assign(before[0])
            layer.moving_variance.assign(before[1])

    def assign(self):
        for layer, before, parts in zip(self.layers, self.before, self.parts, strict=True):
            mean = sum(share * mean for share, mean, _ in parts)
            variance = sum(share * (within + (mine - mean) ** 2) for share, mine, within in parts)
            layer.moving_mean.assign(layer.momentum * before[0] + (1.0 - layer.momentum) * mean)
            layer.moving_variance.assign(layer.momentum * before[1] + (1.0 - layer.momentum) * variance)


def scaling(optimizer):
    """Return what a loss goes through."""
    name = "scale_loss" if KERAS_3 else "get_scaled_loss"
    return getattr(optimizer, name, lambda loss: loss)


def unscaling(optimizer):
    """Return what gradients go through; apply_gradients of Keras 3 does it."""
    return getattr(optimizer, "get_unscaled_gradients", lambda gradients: gradients)


def rounding(optimizer):
    """Return the rounding of a mean of float16 gradients: it is a float16 number, as in a whole batch."""
    if not (KERAS_3 and hasattr(optimizer, "dynamic_scale")):
        return lambda mean: mean
    return lambda mean: tf.cast(tf.cast(mean, tf.float16), mean.dtype)


def rows_between(data, begin, end):
    return tf.nest.map_structure(lambda rows: rows[begin:end], data)


def assert_as_by_hand(training, fits):
    """Within some roundings of float32, weights, moving averages, slots and logs."""
    by_hand, losses = trained_by_hand(training)
    for fitted in fits.values():
        assert_close(fitted.weights, by_hand.weights)
        assert_close(fitted.state, by_hand.state)
        np.testing.assert_allclose(fitted.history["loss"], losses, rtol=1e-6)


def assert_close(arrays, others):
    """Relative to the largest number of an array."""
    assert len(arrays) > 0
    for a, b in zip(arrays, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * float(np.abs(b).max(initial=0.0)))


@pytest.mark.parametrize(
    ("make", "data"),
    [
        # Even micro-batches, then a batch of one row in each, or one of 2, 2, 1 and 1.
        pytest.param(mlp, UNEVEN, id="four_rows_left"),
        pytest.param(mlp, tuple(np.concatenate([a, a])[:54] for a in EVEN), id="six_rows_left"),
        pytest.param(batch_normalized, UNEVEN, id="batch_normalization"),
        pytest.param(siamese, TWO_TEXTS, id="a_table_looked_up_twice"),
    ],
)
def test_micro_batches(make, data):
    """Even and uneven rows; statistics of each micro-batch, and moving averages of the batch."""
    training = Training(make, momentum, data, epochs=4)
    fits = fits_of(training, "gpipe", "dualpipe_v" if make is batch_normalized else "zb_h1")
    assert_same_bits(training, fits, far=None if make is batch_normalized else 1e-5)
    assert_as_by_hand(training, fits)
    notes = [note for note in fits["gpipe"].report.notes if "BatchNormalization" in note]
    if make is batch_normalized:
        assert notes[0].startswith("BatchNormalization normalizes each micro-batch by itself: ")
    else:
        assert notes == []


@needs_keras_3
def test_dropout():
    """Keras 3 counts the calls of a layer: micro-batch by micro-batch, in their order.

    Keras 2 counts in the op: one in a loop draws other masks than four in a step.
    """
    training = Training(two_inputs, momentum, ([X, WORDS.astype("float32")], Y), epochs=4)
    assert_as_by_hand(training, fits_of(training, "gpipe", "zb_h1"))


@pytest.fixture
def policy(request):
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("policy", ["mixed_bfloat16"], indirect=True)
def test_bfloat16(policy):
    training = Training(mlp, momentum, EVEN, epochs=4)
    fits = fits_of(training, "gpipe", "dualpipe_v")
    assert_same_bits(training, fits, far=0.2)
    assert_as_by_hand(training, fits)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_float16_with_a_scaled_loss(policy):
    """The scale grows after five steps whose gradients are finite: once a batch."""

    def scaled():
        return loss_scaling()(keras.optimizers.SGD(0.1, momentum=0.9), dynamic_growth_steps=5)

    training = Training(mlp, scaled, EVEN, epochs=4)
    fits = fits_of(training, "gpipe", "zb_h1")
    assert_same_bits(training, fits, far=0.2)
    assert_as_by_hand(training, fits)
