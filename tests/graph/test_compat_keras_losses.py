"""Losses and metrics: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import normalized_model
from tests.zoo import keras, needs_keras_3
from tf_ooo.compat import keras_losses


def test_summed_losses():
    model = normalized_model()
    assert keras_losses.summed_losses(model) == []
    model.compile("adam", keras.losses.MeanSquaredError(reduction="sum"))
    assert keras_losses.summed_losses(model) == ["mean_squared_error"]
    model.compile("adam", keras.losses.MeanSquaredError(reduction="none"))
    assert keras_losses.summed_losses(model) == ["mean_squared_error"]


def test_masks():
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.Masking(name="mask"), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
    titles = [title.split("/")[-1] for title in keras_losses.masks(model)]
    assert titles == ["mask", "sparse_categorical_crossentropy"], "a masked loss is averaged by rows, unsaid"
    assert keras_losses.masks(normalized_model()) == []


def test_weighted_means():
    """A number without a weight counts as its share of the batch; one with a weight keeps it."""
    model = normalized_model()
    model.evaluate(np.ones((4, 3)), np.ones((4, 4)), verbose=0)
    mean = next(metric for metric in model.metrics if type(metric) is keras.metrics.Mean)
    mean.reset_state()
    own = vars(mean).get("update_state")  # Keras 2 keeps it on the metric
    for share, value in ((0.75, 1.0), (0.25, 5.0)):
        with keras_losses.weighted_means(model, share):
            mean.update_state(tf.constant(value))
    assert float(mean.result()) == 2.0, "Mean.update_state is no longer looked up on the metric"
    with keras_losses.weighted_means(model, 0.5):
        mean.update_state([6.0, 6.0])
    assert float(mean.result()) == pytest.approx((0.75 + 1.25 + 12.0) / 3)
    assert vars(mean).get("update_state") is own


@needs_keras_3
def test_means_of_outputs_that_are_made_later():
    """A share of one for each batch, whatever rows are known."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in "ab"])
    model.compile("sgd", ["mse", "mse"])
    for rows in (4, 2):
        x = keras.ops.ones((rows, 3))
        with keras_losses.weighted_means(model, 0.5):
            model.compute_loss(x=x, y=[x[:, :1], x[:, :1]], y_pred=model(x))
    counts = [float(metric.count) for metric in model._compile_loss.metrics]
    assert counts == [1.0, 1.0], "CompileLoss.metrics, build: batches count by the rows of their traces"


def test_is_kerass_own():
    class Own(keras.losses.MeanSquaredError):
        pass

    assert keras_losses.is_kerass_own(keras.losses.MeanSquaredError())
    assert not keras_losses.is_kerass_own(Own())
    assert not keras_losses.is_kerass_own("mse")


def test_loss_weights():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", loss_weights=[2.0])
    assert keras_losses.loss_weights(model) == [2.0], "compile no longer tells its loss_weights"
    model.compile("sgd", lambda y, p: p)
    assert keras_losses.loss_weights(model) is None


def test_own_loss_code():
    """Only what is not Keras' own may depend on rows in a way that nobody knows."""

    def own(y, p):
        return tf.reduce_mean(y - p)

    class Layer(keras.layers.Layer):
        def call(self, x):
            return x

    def said(loss, *layers):
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])
        model.compile("sgd", loss)
        return keras_losses.own_loss_code(model)

    for loss in ("mse", keras.losses.MeanSquaredError(), keras.losses.mean_squared_error):
        assert said(loss) == []
    assert said(own) == ["loss own"]
    regularized = keras.layers.Dense(2, activity_regularizer="l2", name="regularized")
    texts = said("mse", Layer(name="mine"), regularized)
    assert [text.split("/")[-1].split()[-1] for text in texts] == ["mine", "regularized"]

    class Model(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Model([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert keras_losses.own_loss_code(model) == ["Model"]
