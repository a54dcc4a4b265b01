"""Gradients that ``train_step`` changes before the update are changed once, as those of the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.gans import Gan, InTurns
from tests.graph.pipeline_fits import assert_equal_bits
from tests.graph.pipeline_graphs import Rewritten
from tests.graph.pipeline_models import normal
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(40), needs_keras_3]
X = normal(44, 7)
WORDS = np.random.default_rng(0).integers(0, 30, size=(44, 5))
LIMIT = 0.05


def together(grads):
    """By their common norm, which each of them needs."""
    return tf.clip_by_global_norm(grads, LIMIT)[0]


def guarded(grads):
    return [tf.where(tf.math.is_finite(grad), tf.clip_by_value(grad, -0.01, 0.01), 0.0) for grad in grads]


def of_the_dense(grads):
    return together([tf.convert_to_tensor(grad) for grad in grads])


def of_some(grads):
    """Embeddings' gradients stay as they are."""
    return [grad if isinstance(grad, tf.IndexedSlices) else tf.sign(grad) * 1e-3 for grad in grads]


class Changing(keras.Model):
    change = staticmethod(together)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        grads = self.change(tape.gradient(scaled, weights))
        self.optimizer.apply_gradients(zip(grads, weights, strict=True))
        return {"loss": loss}


def dense(change, optimizer=keras.optimizers.SGD):
    # There are as many layers as zb_v has stages: which ops make a part depends on the CPU's kernels.
    inputs = hidden = keras.Input((7,))
    for units in (9, 8, 6):
        hidden = keras.layers.Dense(units, "tanh")(hidden)
    return compiled(Changing(inputs, keras.layers.Dense(1)(hidden)), change, optimizer(0.5)), X


def of_words(change):
    inputs = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(30, 4)(inputs))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(9, "tanh")(hidden))
    return compiled(Changing(inputs, outputs), change, keras.optimizers.SGD(0.5)), WORDS


def compiled(model, change, optimizer):
    model.change = change
    model.compile(optimizer, "mse")
    return model


def fitted(make, change, schedule=None, rows=44, **options):
    """Its weights and the report."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model, x = make(change)
    callbacks = []
    if schedule is not None:
        options = {"devices": 2, "microbatches": 4, "profile_steps": 0} | options
        callbacks.append(tf_ooo.OOOBackprop(tf_ooo.Pipeline(schedule=schedule, **options)))
    settings = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x[:rows], X[:rows, :1], callbacks=callbacks, **settings)
    return model.get_weights(), callbacks[0].report if callbacks else None


def assert_near(arrays, others):
    for ours, alone in zip(arrays, others, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", [together, guarded])
def test_all_schedules_have_the_same_bits(change):
    """44 rows leave a last batch of 12, in other micro-batches."""
    stock, _ = fitted(dense, change)
    assert not np.allclose(stock[0], fitted(dense, lambda grads: grads)[0][0], rtol=1e-3)
    weights = []
    for schedule in ("gpipe", "zb_h1", "zb_v"):
        left, report = fitted(dense, change, schedule)
        assert Rewritten(report).unordered() == []
        assert_near(left, stock)
        weights.append(left)
    for left in weights:
        assert_equal_bits(left, weights[0])


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 3},
        {"devices": 4, "replicas": 2},
        {"first_steps": "cut"},
        {"recompute": "all"},
        {"check_loss": False},
    ],
    ids=str,
)
def test_as_stock(options):
    assert_near(fitted(dense, together, "zb_h1", **options)[0], fitted(dense, together)[0])


def scaling(rate):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=64.0)


def test_gradients_of_a_scaled_loss():
    def make(change):
        return dense(change, scaling)

    assert_near(fitted(make, together, "gpipe")[0], fitted(make, together)[0])


@pytest.mark.parametrize("change", [of_the_dense, of_some])
def test_an_embedding(change):
    assert_near(fitted(of_words, change, "gpipe")[0], fitted(of_words, change)[0])


def test_numbers_of_an_embeddings_rows_are_refused():
    """Stock's norm counts a row as often as it comes: parts of a batch have others."""
    with pytest.raises(BackendError, match="an embedding's rows"):
        fitted(of_words, together, "gpipe")


class ByItsInputs(Changing):
    """Gradients of the weights are multiplied by the size of those of the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        of_inputs, *grads = tape.gradient(loss, [x, *weights])
        size = tf.norm(of_inputs)
        self.optimizer.apply_gradients([(g * size, w) for g, w in zip(grads, weights, strict=True)])
        return {"loss": loss}


@pytest.mark.parametrize("check_loss", [True, False])
def test_gradients_of_inputs_are_refused(check_loss):
    """Parts of a batch have other rows of them, which nothing adds up."""

    def make(change):
        inputs = keras.Input((7,))
        outputs = keras.layers.Dense(1)(keras.layers.Dense(9, "tanh")(inputs))
        return compiled(ByItsInputs(inputs, outputs), change, keras.optimizers.SGD(0.5)), X

    with pytest.raises(BackendError, match="changes gradients between its tape"):
        fitted(make, None, "gpipe", check_loss=check_loss)


class ClippingTape(tf.GradientTape):
    def gradient(self, *args, **kwargs):
        return together(super().gradient(*args, **kwargs))


@pytest.mark.parametrize("kind", [Gan, InTurns])
def test_in_turns(kind):
    class Clipped(kind):
        def train_step(self, data):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tf, "GradientTape", ClippingTape)
                return super().train_step(data)

    def make(_):
        model = Clipped()
        model.compile()
        model(X[:2])
        return model, X

    assert_near(fitted(make, None, "zb_h1", rows=32)[0], fitted(make, None, rows=32)[0])
