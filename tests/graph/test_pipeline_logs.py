"""Logs of a train step: texts, flags, whole numbers, nests, and what the step has just counted."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(2), needs_keras_3]

X = np.random.default_rng(0).normal(1.0, 1.0, size=(48, 6)).astype("float32")


class Logging(keras.Model):
    """Returns what is the batch's from micro-batches too, and ``others``, which is not."""

    others = mixed = False

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(9, "tanh"), keras.layers.Dense(1)]
        self.seen = self.add_weight(shape=(), name="seen", initializer="zeros", trainable=False)
        self.average = tf.Variable(0.0, trainable=False)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(grads, self.trainable_weights)
        self.seen.assign_add(tf.cast(tf.shape(x)[0], "float32"))
        self.average.assign(0.5 * self.average + 0.5 * loss)
        logs = {
            "loss": loss,
            "nested": {"largest": tf.reduce_max(outputs), "within": {"total": tf.reduce_sum(x[:, 0])}},
            "any": tf.reduce_any(x > 3.0),
            "all": tf.reduce_all(x > 0.0),
            "rows": tf.shape(x)[0],
            "positive": tf.math.count_nonzero(x > 0),
            "seen": self.seen,
            "dozens": self.seen / 12.0,
            "average": self.average + 0.0,
            "rate": self.optimizer.learning_rate,
            "size": tf.size(self.parts[0].kernel),
            "kind": "text",
            "text": tf.constant("text"),
            "three": 3,
        }
        if self.others:
            logs |= {
                "norm": tf.linalg.global_norm(grads),
                "place": tf.argmax(outputs[:, 0]),
                "below": loss < 1.0,
                "signs": tf.sign(x[0]),
                "numbers": tf.size(x),
                "shape": tf.shape(x),
            }
        if self.mixed:
            largest, right = tf.reduce_max(outputs), tf.cast(x[:, 1] > 1.2, tf.float32)
            logs |= {
                "gap": largest - tf.reduce_min(outputs),
                "beside": largest / tf.reduce_mean(outputs**2),
                "precision": tf.reduce_sum(right * x[:, 0]) / tf.reduce_sum(right),
                "variance": tf.math.reduce_variance(outputs),
                "half": 0.5 * tf.reduce_sum(outputs),
                "mean": 2.0 * tf.reduce_mean(outputs)
                - tf.reduce_sum(outputs) / tf.cast(tf.size(outputs), "float32"),
            }
        return logs


class Kept(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def logged(*callbacks, others=False, mixed=False):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model, kept = Logging(), Kept()
    model.others, model.mixed = others, mixed
    model(X[:2])
    model.compile(keras.optimizers.SGD(0.05))
    model.fit(X, X[:, :1], batch_size=16, verbose=0, shuffle=False, callbacks=[*callbacks, kept])
    return kept.logs


def pipeline():
    return tf_ooo.OOOBackprop(tf_ooo.Pipeline(schedule="gpipe", devices=2, microbatches=4, profile_steps=0))


def test_as_stock():
    callback = pipeline()
    for expected, logs in zip(logged(), logged(callback), strict=True):
        assert expected.keys() == logs.keys()
        for name, value in expected.items():
            if isinstance(value, float):
                assert logs[name] == pytest.approx(value, rel=1e-5), name
            else:
                assert logs[name] == value, name
    assert callback.report.notes == []


def test_others_are_named():
    callback = pipeline()
    logged(callback, others=True)
    notes = [note for note in callback.report.notes if note.startswith("the log ")]
    said = {note.split()[2]: note for note in notes}
    assert said.keys() == {"norm", "place", "below", "signs", "numbers", "shape"}
    assert "the mean of its micro-batches' values" in said.pop("norm")
    assert all("the last micro-batch's" in note for note in said.values())


def test_functions_of_several_numbers_are_compared_with_the_batchs():
    """The op at their end, a difference or a quotient, is that of a mean over rows as well."""
    callback = pipeline()
    logs, expected = logged(callback, mixed=True), logged(mixed=True)
    notes = [
        note for note in callback.report.notes if "is that of micro-batches, not the batch's own" in note
    ]
    assert {note.split()[2] for note in notes} == {"gap", "beside", "precision", "variance", "half"}
    assert [each["mean"] for each in logs] == pytest.approx([each["mean"] for each in expected], rel=1e-5)


class Extreme(keras.Model):
    """Its metrics: a mean of a batch's largest outputs, one of its loss, and a sum of its rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.largest.update_state(tf.reduce_max(outputs))
        self.loss_mean.update_state(loss)
        self.rows.update_state(tf.shape(x)[0])
        return {metric.name: metric.result() for metric in (self.largest, self.loss_mean, self.rows)}


def extreme():
    inputs = keras.Input((6,))
    model = Extreme(inputs, keras.layers.Dense(1)(keras.layers.Dense(5)(inputs)))
    model.largest, model.loss_mean = keras.metrics.Mean("largest"), keras.metrics.Mean("loss_mean")
    model.rows = keras.metrics.Sum("rows")
    model.compile("sgd", "mse")
    return model


def of_rows(y, outputs):
    """A number of the batch, which Keras takes the mean of."""
    return tf.math.reduce_std(outputs) * tf.math.reduce_std(y)


def compiled():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(5)(inputs)))
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.R2Score(), of_rows])
    return model


@pytest.mark.parametrize(("make", "name"), [(extreme, "largest"), (compiled, "of_rows")])
def test_metrics_of_no_mean_over_rows_are_named(make, name):
    """The mean of micro-batches' extremes stood in the logs, and nothing was said."""
    callback = pipeline()
    make().fit(X, X[:, :1], batch_size=16, verbose=0, callbacks=[callback])
    (note,) = callback.report.notes
    assert note.startswith(f"the log {name} is that of micro-batches")
