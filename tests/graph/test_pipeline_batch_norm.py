"""Batch normalization in pipelines: over how many rows, what is said of it, and stock's result."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import tf_ooo
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = pytest.mark.devices(2)

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")


def normalized(trainable=True, dropout=0.0):
    layers = keras.layers
    keras.utils.set_random_seed(1)
    norm = layers.BatchNormalization(momentum=0.8, name="norm", trainable=trainable)
    parts = [layers.Dense(9), norm, layers.ReLU(), layers.Dropout(dropout, seed=3), layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *parts])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model, batch_size=16, **options):
    """Weights with moving averages and losses, and the report; without options those of stock training."""
    callbacks = []
    if options:
        callbacks = [tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=2, profile_steps=0, **options))]
    settings = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, X[:, :1], callbacks=callbacks, **settings)
    left = [*model.get_weights(), np.float32(history.history["loss"])]
    return left, callbacks[0].report if callbacks else None


@pytest.mark.parametrize(("batch_size", "count"), [(16, 2), (24, 3), (12, 1), (48, 6)])
def test_micro_batches_by_default(batch_size, count):
    _, report = fit(normalized(), batch_size, schedule="gpipe")
    assert report.pipeline.microbatches == count


@pytest.mark.parametrize("options", [{"microbatches": 8}, {}], ids=str)
def test_as_many_as_are_asked_for_or_are_of_no_concern(options):
    model = normalized(trainable=bool(options))
    _, report = fit(model, schedule="gpipe", **options)
    assert report.pipeline.microbatches == 8


def test_replicas_of_one_device_normalize_over_their_part():
    """It is said anew: eight rows of eight micro-batches become half of the batch."""
    _, report = fit(normalized(), batch_size=48, replicas=2)
    (note,) = [note for note in report.notes if "BatchNormalization normalizes" in note]
    assert "over 24 rows instead of the batch's 48" in note
    assert report.pipeline.microbatches == 2


@needs_keras_3
@pytest.mark.parametrize("options", [{}, {"batch_norm": "whole_batch"}], ids=str)
def test_called_as_in_inference(options):
    """Keras' guide to fine-tuning calls so; a fit of Keras 3 takes the batch's statistics all the same."""

    def called():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        base = keras.Sequential([inputs, keras.layers.Dense(9), keras.layers.BatchNormalization(name="norm")])
        outputs = keras.layers.BatchNormalization(name="own")(base(inputs, training=False), training=False)
        model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    ours, report = fit(called(), batch_size=24, schedule="gpipe", **options)
    assert report.pipeline.microbatches == (1 if options else 3)
    (note,) = [note for note in report.notes if "norm" in note and "own" in note]
    if options:
        stock, _ = fit(called(), batch_size=24)
        for one, other in zip(stock, ours, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_smaller_last_batch_has_fewer_micro_batches():
    _, report = fit(normalized(), batch_size=34, schedule="gpipe")  # the last one has 14
    assert report.pipeline.microbatches == 4
    assert not report.fallback_reason


class Heard(keras.callbacks.Callback):
    def __init__(self, caplog):
        super().__init__()
        self.caplog, self.before = caplog, None

    def on_train_batch_end(self, batch, logs=None):
        if self.before is None:
            self.before = [record.getMessage() for record in self.caplog.records]


def test_said_before_the_first_step(caplog):
    heard = Heard(caplog)
    callback = tf_ooo.OOOBackprop(mode="pipeline", devices=2, microbatches=4, profile_steps=0)
    with caplog.at_level(logging.WARNING, "tf_ooo"):
        normalized(dropout=0.3).fit(X, X[:, :1], batch_size=16, verbose=0, callbacks=[callback, heard])
    (norm,) = [text for text in heard.before if text.startswith("BatchNormalization")]
    for said in (
        "norm",
        "over 4 rows instead of the batch's 16",
        "moving averages change once a step",
        "batch_norm='whole_batch'",
        "visibly worse",
    ):
        assert said in norm
    assert sum(text.startswith("random numbers are drawn") for text in heard.before) == 1
    assert norm in callback.report.notes


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_whole_batch_is_stock(schedule):
    """Weights, moving averages, losses and masks."""
    stock, _ = fit(normalized(dropout=0.3))
    ours, report = fit(normalized(dropout=0.3), schedule=schedule, batch_norm="whole_batch")
    for a, b in zip(stock, ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert report.pipeline.microbatches == 1
    assert any("every micro-batch would wait for all others" in note for note in report.notes)


def test_whole_batch_changes_nothing_where_nothing_is_normalized():
    _, report = fit(normalized(trainable=False), schedule="gpipe", batch_norm="whole_batch", microbatches=4)
    assert report.pipeline.microbatches == 4


@pytest.mark.parametrize("options", [{"microbatches": 4}, {"replicas": 2}], ids=str)
def test_whole_batch_in_several_parts_is_refused(options):
    model = normalized()
    before = model.get_weights()
    with pytest.raises(BackendError, match="batch_norm='whole_batch' needs one micro-batch for norm|sequent"):
        fit(model, batch_norm="whole_batch", **options)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class Averaging(keras.layers.Layer):
    """Keeps a moving average of what it sees."""

    def build(self, shape):
        self.average = self.add_weight(shape=(shape[-1],), trainable=False, name="average")

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * keras.ops.mean(x, 0))
        return x


@needs_keras_3
def test_states_that_were_not_compared_are_named(caplog):
    layers = keras.layers
    parts = [
        layers.Dense(9),
        Averaging(name="averaging"),
        layers.BatchNormalization(),
        layers.Dropout(0.2),
        layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((6,)), *parts])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with caplog.at_level(logging.WARNING, "tf_ooo"):
        fit(model, microbatches=4, schedule="gpipe", check_loss=False)
    (text,) = [each.getMessage() for each in caplog.records if "was not compared" in each.getMessage()]
    assert "averaging/average" in text
    assert "moving_mean" not in text
    assert "seed" not in text


def test_a_class_of_the_users_own_is_told_how_to_keep_its_statistics():
    class Mine(keras.layers.BatchNormalization):
        pass

    def model():
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((6,)), keras.layers.Dense(9), Mine(), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    with pytest.raises(BackendError, match="rows first meet at.*batch_norm='whole_batch'"):
        fit(model(), schedule="gpipe", microbatches=2)
    (*weights, _), _ = fit(model(), schedule="gpipe", batch_norm="whole_batch")
    (*stock, _), _ = fit(model())
    for ours, expected in zip(weights, stock, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
