"""Predictions of more rows than the stages' memory is for; on four logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import Training, assert_equal_bits, pipelined
from tests.graph.pipeline_models import UNEVEN, X_UNEVEN, adam
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.modes.pipeline.placed_step import StagedEvaluation

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(30)]
layers = keras.layers

# A training batch of 16 rows has micro-batches of four.
ROWS, MANY = 4, np.tile(X_UNEVEN, (40, 1))[:1202]
LABELS = np.arange(len(MANY)) % 3
LIMIT_BYTES = 40_000


@pytest.fixture(name="rows")
def _rows(monkeypatch):
    """Note the rows of all that passes through the stages, by kind."""
    rows, step = [], StagedEvaluation._step

    def noting(self, batch, spec):
        rows.append((self._kind, tf.nest.flatten(batch)[0].shape[0]))
        return step(self, batch, spec)

    monkeypatch.setattr(StagedEvaluation, "_step", noting)
    return rows


def deep():
    hidden = [layers.Dense(width, activation="relu") for width in (24, 24, 24, 24)]
    return keras.Sequential([keras.Input((7,)), *hidden, layers.Dense(3)])


class Asking(keras.callbacks.Callback):
    """Predicts and evaluates during the fit, with the weights of then."""

    def __init__(self, batch_size, on_batch, labels=LABELS):
        super().__init__()
        self._batch_size, self._on_batch, self._labels = batch_size, on_batch, labels

    def on_epoch_end(self, epoch, logs=None):
        self.weights = self.model.get_weights()
        self.predicted, self.evaluated = self.of_now(self._batch_size)

    def of_now(self, batch_size):
        asked = {"batch_size": batch_size, "verbose": 0}
        if self._on_batch:
            return self.model.predict_on_batch(MANY), None
        return self.model.predict(MANY, **asked), self.model.evaluate(MANY, self._labels, **asked)


def asked_in_fit(batch_size=1000, make=deep, on_batch=False, **options):
    """A fit with a callback that asks; and its report."""
    training, asking = Training(make, adam, UNEVEN, epochs=1), Asking(batch_size, on_batch)
    fitted = training.piped(pipelined("1f1b", **options), asking, measured_before=False)
    training.model.set_weights(asking.weights)
    return asking, fitted.report


def pieces_of_all(rows):
    """The rows of each piece of MANY, checked: as many as fit, as long as there are."""
    _, size = rows[0]
    assert ROWS <= size < len(MANY) / 2
    whole, left = divmod(len(MANY), size)
    return size, [("predict", size)] * whole + [("predict", left)] * bool(left)


def test_pieces_have_as_many_rows_as_fit(rows):
    asking, report = asked_in_fit(len(MANY), memory_limit_bytes=LIMIT_BYTES)
    size, pieces = pieces_of_all(rows)
    assert size > ROWS
    assert rows == pieces + (pieces if KERAS_3 else [("test", len(MANY))])
    in_pieces, evaluated = asking.predicted, asking.evaluated
    stock, stock_evaluated = asking.of_now(len(MANY))
    np.testing.assert_allclose(evaluated, stock_evaluated, rtol=1e-6)
    np.testing.assert_allclose(in_pieces, stock, rtol=0, atol=1e-6)
    assert_equal_bits([asking.of_now(size)[0]], [in_pieces])
    assert wholes(report) == ([] if KERAS_3 else ["evaluate takes batches whole: that is for Keras 3"])


def test_predict_on_batch(rows):
    asking, _ = asked_in_fit(on_batch=True, memory_limit_bytes=LIMIT_BYTES)
    assert rows == pieces_of_all(rows)[1]
    np.testing.assert_allclose(asking.predicted, asking.of_now(1000)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"memory_limit_bytes": 10**9}])
def test_what_fits_passes_whole_and_has_the_bits_of_stock(rows, options):
    asking, _ = asked_in_fit(**options)
    assert rows == [("predict", 1000), ("predict", 202), ("test", 1000), ("test", 202)]
    predicted, evaluated = asking.predicted, asking.evaluated
    stock, stock_evaluated = asking.of_now(1000)
    assert_equal_bits([stock], [predicted])
    assert evaluated == stock_evaluated


class OfAllRows(keras.Model):
    """Predicts one number for a batch, beside what each row has."""

    def __init__(self):
        super().__init__()
        self.layers_ = [layers.Dense(24, activation="relu") for _ in range(4)]
        self.last = layers.Dense(3)

    def call(self, x):
        for layer in self.layers_:
            x = layer(x)
        return self.last(x)

    def predict_step(self, data):
        return {"mean": tf.reduce_mean(self(data), 0, keepdims=True)}


@needs_keras_3
def test_outputs_of_a_whole_batch_are_not_made_of_pieces(rows):
    asking, report = asked_in_fit(make=OfAllRows, memory_limit_bytes=LIMIT_BYTES)
    piece, *others = [count for kind, count in rows if kind == "predict"]
    assert piece < 202
    assert others == [1000, 202]
    predicted = asking.predicted["mean"]
    assert_equal_bits([asking.of_now(1000)[0]["mean"]], [predicted])
    assert wholes(report) == [
        "predict takes batches whole: its outputs have not one row for each of a batch",
        "evaluate takes batches whole: OfAllRows has a predict_step of its own",
    ]


def regularized():
    hidden = [layers.Dense(24, activation="relu", kernel_regularizer="l2") for _ in range(4)]
    return keras.Sequential([keras.Input((7,)), *hidden, layers.Dense(3)])


def adding():
    """A loss of what a layer computes."""
    hidden = [layers.Dense(24, activation="relu", activity_regularizer="l2") for _ in range(4)]
    return keras.Sequential([keras.Input((7,)), *hidden, layers.Dense(3)])


def masked():
    """The mask of the rows' places goes to the loss."""
    inputs = keras.Input((7,))
    x = layers.Masking()(layers.Reshape((7, 1))(inputs))
    for _ in range(4):
        x = layers.TimeDistributed(layers.Dense(24, activation="relu"))(x)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(3))(x))


def wholes(report):
    return [note for note in report.notes if "whole: " in note]


@needs_keras_3
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (regularized, "the model adds losses of its own (regularizers, add_loss)"),
        (adding, "the model adds losses of its own (regularizers, add_loss)"),
        (masked, "masks go with the model's outputs"),
    ],
)
def test_where_more_than_outputs_is_needed_evaluations_pass_whole(rows, make, said):
    labels = LABELS if make is not masked else np.tile(LABELS[:, None], (1, 7))
    data = (X_UNEVEN, labels[: len(X_UNEVEN)])
    training, asking = Training(make, adam, data, epochs=1), Asking(1000, False, labels)
    fitted = training.piped(pipelined("1f1b", memory_limit_bytes=LIMIT_BYTES), asking, measured_before=False)
    assert [count for kind, count in rows if kind == "test"] == [1000, 202]
    assert wholes(fitted.report) == [f"evaluate takes batches whole: {said}"]
    training.model.set_weights(asking.weights)
    assert asking.evaluated == asking.of_now(1000)[1]


@needs_keras_3
def test_validation_with_weights_of_rows_and_metrics(rows):
    """All rows count together, as in stock."""
    training = Training(
        deep, adam, UNEVEN, epochs=1, weighted_metrics=["accuracy"],
        metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )  # fmt: skip
    asking, weights = Asking(1000, False), np.linspace(0.1, 3.0, len(MANY)).astype("float32")
    data = (MANY, LABELS, weights)
    fitted = training.piped(
        pipelined("1f1b", memory_limit_bytes=LIMIT_BYTES), asking,
        measured_before=False, validation_data=data, validation_batch_size=700,
    )  # fmt: skip
    assert ("test", 700) not in rows
    training.model.set_weights(asking.weights)
    stock = training.model.evaluate(
        *data[:2], sample_weight=weights, batch_size=700, verbose=0, return_dict=True
    )
    validated = {name: fitted.history[f"val_{name}"][0] for name in stock}
    assert len(stock) == 3
    for name, value in stock.items():
        np.testing.assert_allclose(validated[name], value, rtol=1e-6)
    assert not wholes(fitted.report)
