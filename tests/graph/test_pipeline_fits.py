"""Functions that were traced before a fit, logs, and what Keras compiles; on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_near, assert_same_bits, fits_of, pipelined
from tests.graph.pipeline_graphs import assert_in_order
from tests.graph.pipeline_models import EVEN, UNEVEN, Custom, X, Y, adam, mlp, whole
from tests.zoo import keras, needs_keras_3
from tf_ooo.compat import train_function

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(25)]
traced_otherwise = needs_keras_3  # Keras 2 traces such parts otherwise


class Traced(keras.layers.Layer):
    """A layer that is a tf.function of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.layers.Dense(19, activation="tanh")

    def build(self, shape):
        self.inner.build(shape)

    @tf.function
    def call(self, x):
        return self.inner(x)


class TracedStep(keras.Model):
    """Its train_step is one, with a condition."""

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if tf.reduce_sum(x) > 1e9:
                loss *= 2.0
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@traced_otherwise
def test_functions_that_were_traced_before_see_the_moved_weights():
    """TensorFlow would use them again as they were traced, with the weights of then."""

    def make():
        inputs = keras.Input((7,))
        x = keras.layers.Dense(23, activation="gelu")(Traced()(inputs))
        return TracedStep(inputs, keras.layers.Dense(3)(x))

    training = Training(make, adam, EVEN, metrics=None)
    assert_same_bits(training, fits_of(training, "gpipe", "1f1b"))


def holding_a_traced_function():
    """No method holds it."""
    model = mlp()
    model.layers[-1].call = tf.function(model.layers[-1].call)
    return model


@traced_otherwise
def test_a_traced_function_that_no_method_holds_is_refused():
    """In another trace it is not found, and would leave its weights untrained: in the last batch, of 13 rows,
    the first part has as many as before.
    """
    training = Training(holding_a_traced_function, adam, (X[:45], Y[:45]))
    with pytest.raises(tf_ooo.BackendError, match="is used in a tf.function that was traced before"):
        training.fit(pipelined("gpipe"))


@traced_otherwise
def test_a_traced_function_is_placed_with_the_step_that_called_it():
    """Batches as large as the first, whose trace is not made again."""
    training = Training(holding_a_traced_function, adam, EVEN, epochs=2)
    assert_near(training.stock, training.piped(pipelined("gpipe")), 1e-5)


@traced_otherwise
def test_what_models_within_predict():
    """In a fit, where a callback asks; and after it, with other weights."""

    def make():
        encoder = keras.Sequential(
            [keras.Input((7,)), keras.layers.Dense(12), keras.layers.Dense(9)], name="inner"
        )
        inputs = keras.Input((7,))
        return keras.Model(inputs, keras.layers.Dense(3)(encoder(inputs)))

    training = Training(make, adam, EVEN, epochs=3)
    encoder = training.model.get_layer("inner")
    errors = []

    def predict(*args):
        # They are one batch, since some CPUs round products of fewer rows otherwise.
        predicted = encoder.predict(X, batch_size=len(X), verbose=0)
        errors.append(float(np.abs(predicted - np.asarray(encoder(X))).max()))

    training.piped(pipelined("1f1b"), keras.callbacks.LambdaCallback(on_epoch_end=predict))
    encoder.set_weights([2 * weight for weight in encoder.get_weights()])
    predict()
    assert errors == [0.0] * 4


class OwnMeans(Custom):
    """Its train_step updates means by itself, one with a number, one with a number for each row."""

    def __init__(self):
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="mean_loss")
        self.by_row = keras.metrics.Mean(name="by_row")

    def train_step(self, data):
        x, y = data
        logs = super().train_step(data)
        self.loss_tracker.update_state(logs["loss"])
        self.by_row.update_state(tf.reduce_sum(x, axis=1))
        return {"mean_loss": self.loss_tracker.result(), "by_row": self.by_row.result()}


@traced_otherwise
def test_means_of_one_s_own():
    """The last batch has 4 rows, in micro-batches of 2, 1 and 1."""
    training = Training(OwnMeans, adam, UNEVEN, epochs=3, loss=None, metrics=None)
    fitted = training.piped(pipelined("1f1b", microbatches=3))
    for name in ("mean_loss", "by_row"):
        assert fitted.history[name] == pytest.approx(training.stock.history[name], rel=1e-5)
    # The last of three layers may go to one device with the rest, and the loss alone to the other.
    assert_in_order(fitted.report, 2, weights_everywhere=False)


def test_rows_that_are_fewer_than_micro_batches():
    """Last batches of 2 and 1 rows: of 4 and 6 rows they are in test_pipeline_by_hand.py."""
    x, y = (np.concatenate([array, array]) for array in EVEN)
    training = Training(mlp, adam, EVEN, epochs=3)
    for rows in (50, 49):
        uneven = training.on((x[:rows], y[:rows]))
        assert_same_bits(uneven, fits_of(uneven, "gpipe", "zb_h1"))


def test_what_keras_compiles_is_not_during_the_fit(monkeypatch):
    """Keras sets jit_compile as on a GPU: nothing compiles during the fit, nor in its evaluations."""
    stock = Training(mlp, adam, EVEN).stock
    monkeypatch.setattr(train_function, "keras_compiles_by_itself", lambda model: True)
    training, seen = Training(mlp, adam, EVEN, jit_compile=True), []
    model = training.model
    saw = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(model.jit_compile)
    )
    fitted = training.piped(pipelined("gpipe"), saw, validation_data=EVEN)
    assert_near(stock, fitted, far=1e-5)
    assert set(seen) == {False}
    assert model.jit_compile is True
    assert len([note for note in fitted.report.notes if "jit_compile" in note]) == 1
    assert_in_order(fitted.report, 2)


def test_masks_are_named():
    """Each micro-batch's loss divides by its own."""
    words = np.where(np.random.default_rng(3).random((48, 6)) < 0.3, 0, 1 + whole(28, 48, 6))

    def make():
        embedding = keras.layers.Embedding(29, 8, mask_zero=True)
        hidden = (keras.layers.Dense(width) for width in (7, 5, 3))
        return keras.Sequential([keras.Input((6,)), embedding, *hidden])

    training = Training(make, adam, (words, whole(3, 48, 6)), epochs=1)
    notes = training.piped(pipelined("gpipe")).report.notes
    masked = [note for note in notes if "masked" in note]
    assert len(masked) == 1
    assert "embedding" in masked[0]
