"""Losses and gradients that are not the mean of their micro-batches': refused, and what is let through."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.compat import runtime
from tests.graph.pipeline_fits import assert_equal_bits, compiled_model, pipelined
from tests.graph.pipeline_models import X, Y, adam
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError
from tf_ooo.tracing.micro_batches import StepRefused

pytestmark = pytest.mark.devices(2)


def disturbed():
    """With what makes other numbers of a micro-batch than of the batch, without any fault of the loss."""
    layers = keras.layers
    parts = [layers.Dense(9, "relu"), layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(3)]
    return keras.Sequential([keras.Input((7,)), *parts])


def one_hot(y):
    return tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 3)


def mean(y, p):
    return tf.reduce_mean((one_hot(y) - p) ** 2)


def of_each_row(y, p):
    return tf.reduce_mean((one_hot(y) - p) ** 2, -1)


def added_up(y, p):
    return tf.reduce_sum((one_hot(y) - p) ** 2)


def contrasted(y, p):
    similar = tf.matmul(p, p, transpose_b=True)
    rows = tf.range(tf.shape(p)[0])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(rows, similar))


def of_classes(y, p):
    weights = tf.cast(tf.reshape(y, [-1]) > 0, tf.float32)
    return tf.reduce_sum(of_each_row(y, p) * weights) / tf.reduce_sum(weights)


class Trained(keras.Model):
    """Its own train_step: a loss, and what happens to gradients before they are applied."""

    def __init__(self, loss, change=lambda gradients, weights: gradients, make=disturbed):
        super().__init__()
        self.inner, self.of, self.change = make(), loss, change

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.of(data[1], self(data[0], training=True))
        weights = self.trainable_variables
        gradients = self.change(tape.gradient(loss, weights), weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


class AddsLoss(keras.layers.Layer):
    """Adds a loss of its own, and noise that is there in inference, too."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(self.reduce(x**2))
        return x + 0.01 * tf.random.stateless_normal(tf.shape(x), (1, 2))


def adding(reduce):
    parts = [keras.layers.Dense(9), AddsLoss(reduce), keras.layers.Dense(3)]
    return lambda: keras.Sequential([keras.Input((7,)), *parts])


def fit(make, loss, **options):
    model = compiled_model(make, adam, loss=loss, metrics=None)
    model(X[:16])
    before = model.get_weights()
    callback = pipelined("gpipe", **{"devices": 2, "microbatches": 4} | options)
    try:
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[callback])
    except BackendError:
        assert_equal_bits(before, model.get_weights())
        raise
    return callback.report


REFUSED = "adds up rows"
OTHER = "compares rows with one another, or divides by something else"


@pytest.mark.parametrize(
    ("make", "loss", "text"),
    [
        pytest.param(disturbed, added_up, f"{REFUSED} (looked at: loss added_up)", id="sum"),
        pytest.param(disturbed, contrasted, OTHER, id="rows"),
        # Twice as many rows to be told from: the loss becomes about twice as large, and is no sum.
        pytest.param(disturbed, lambda y, p: contrasted(y, p / 9), OTHER, id="about-twice"),
        pytest.param(disturbed, of_classes, OTHER, id="masked"),
        pytest.param(lambda: Trained(added_up), None, f"{REFUSED} (looked at: Trained)", id="own-sum"),
        pytest.param(lambda: Trained(of_each_row), None, REFUSED, id="vector"),
        pytest.param(lambda: Trained(contrasted), None, OTHER, id="own-rows"),
        pytest.param(adding(tf.reduce_sum), of_each_row, REFUSED, id="add_loss"),
    ],
)
def test_a_loss_that_is_no_mean_of_rows(make, loss, text):
    with pytest.raises(BackendError, match=re.escape(text)) as raised:
        fit(make, loss)
    assert "check_loss=False" in str(raised.value)
    assert "microbatches=1" in str(raised.value)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        pytest.param(disturbed, mean, id="mean"),
        pytest.param(disturbed, of_each_row, id="rows"),
        pytest.param(lambda: Trained(mean), None, id="own"),
        pytest.param(adding(tf.reduce_mean), of_each_row, id="add_loss"),
    ],
)
def test_a_mean_of_rows_is_trained(make, loss):
    assert fit(make, loss).added_edges


@needs_keras_3
@pytest.mark.parametrize("size", [(7, 5), (16, 16)])
def test_a_bias_whose_gradient_cancels_is_no_row_that_meets_another(size):
    """Instance normalization takes each image's mean off again: rounding is all that is left."""
    layers, numbers = keras.layers, np.random.default_rng(1)
    x, y = numbers.normal(size=(24, *size, 3)).astype("float32"), numbers.normal(size=(24, 3))
    parts = [layers.Conv2D(8, 3, padding="same"), layers.GroupNormalization(-1), layers.ReLU()]
    parts += [layers.Conv2D(5, 3), layers.GroupNormalization(-1), layers.GlobalAveragePooling2D()]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((*size, 3)), *parts, layers.Dense(3)])
    model.compile("adam", "mse")
    callback = pipelined("gpipe", devices=2, microbatches=2)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert callback.report.added_edges


@needs_keras_3
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_a_layer_in_half_precision_has_its_rounding(policy):
    def in_half():
        parts = [keras.layers.Dense(9, "tanh"), keras.layers.Dense(5, "tanh", dtype=policy)]
        return keras.Sequential([keras.Input((7,)), *parts, keras.layers.Dense(3, dtype="float32")])

    assert fit(in_half, mean).added_edges
    with pytest.raises(BackendError, match=OTHER):
        fit(in_half, contrasted)


def test_a_term_that_is_let_in_later_is_there_already():
    """A callback sets its factor, 0 at first, as annealing does."""
    factor = tf.Variable(0.0, trainable=False)

    def annealed(y, p):
        return mean(y, p) + factor * tf.math.reduce_variance(p)

    with pytest.raises(BackendError, match=OTHER):
        fit(disturbed, annealed)
    assert factor.numpy() == 0.0


@pytest.mark.parametrize("options", [{"check_loss": False}, {"microbatches": 1}], ids=str)
def test_the_way_out(options):
    assert fit(disturbed, contrasted, **options).pipeline is not None


def test_the_check_changes_no_state():
    """Counts, moving averages and seeds go on as if nothing had been looked at."""
    with_check, without = Once(), Once()
    for model, check_loss in ((with_check, True), (without, False)):
        keras.utils.set_random_seed(3)
        model.compile("sgd")
        callback = pipelined("gpipe", devices=2, check_loss=check_loss)
        model.fit(X[:32], Y[:32], batch_size=16, verbose=0, callbacks=[callback])
    assert int(with_check.calls.numpy()) == int(without.calls.numpy()) > 0
    assert_equal_bits(with_check.get_weights(), without.get_weights())


class Once(Trained):
    """Counts its forward passes."""

    def __init__(self):
        keras.utils.set_random_seed(2)
        super().__init__(mean)
        self.calls = tf.Variable(0, trainable=False)

    def train_step(self, data):
        self.calls.assign_add(1)
        return super().train_step(data)


def clipped_by_norm(gradients, weights):
    return [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]


def clipped_together(gradients, weights):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def clipped(gradients, weights):
    return [tf.clip_by_value(gradient, -0.1, 0.1) for gradient in gradients]


def signs(gradients, weights):
    return [tf.sign(gradient) for gradient in gradients]


def noisy(gradients, weights):
    return [gradient + tf.random.normal(tf.shape(gradient)) for gradient in gradients]


def one_of_them(gradients, weights):
    return [*gradients[:-1], gradients[-1] / tf.norm(gradients[-1])]


def finite(gradients, weights):
    return [tf.where(tf.math.is_finite(gradient), gradient, 0.0) for gradient in gradients]


def numbers(gradients, weights):
    zeros = map(tf.zeros_like, gradients)
    return [tf.where(tf.math.is_nan(g), z, g) for g, z in zip(gradients, zeros, strict=True)]


def checked(gradients, weights):
    return [tf.debugging.check_numerics(gradient, "gradient") * 0.5 for gradient in gradients]


def skipped(gradients, weights):
    """None is applied where one of them is not finite."""
    whole = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
    return [tf.cond(whole, lambda g=gradient: g, lambda g=gradient: g * 0.0) for gradient in gradients]


def adaptive(gradients, weights):
    """Clips by the weights' norms (Brock et al. 2021)."""
    norms = [0.01 * tf.norm(weight) for weight in weights]
    return [tf.clip_by_norm(gradient, norm) for gradient, norm in zip(gradients, norms, strict=True)]


def by_the_batch(gradients, weights):
    return noisy(clipped(gradients, weights), weights)


@pytest.mark.parametrize("change", [noisy, by_the_batch])
def test_gradients_changed_before_the_optimizer(change):
    with pytest.raises(BackendError, match="changes gradients between its tape and the optimizer") as raised:
        fit(lambda: Trained(mean, change), None)
    assert "global_clipnorm=" in str(raised.value)
    assert fit(lambda: Trained(mean, change), None, microbatches=1).pipeline is not None


def decayed(gradients, weights):
    return [gradient + 0.1 * weight for gradient, weight in zip(gradients, weights, strict=True)]


def scaled(gradients, weights):
    return [gradient / tf.sqrt(tf.cast(tf.size(gradient), tf.float32)) for gradient in gradients]


def centred(gradients, weights):
    return [gradient - tf.reduce_mean(gradient, 0, keepdims=True) for gradient in gradients]


LINEAR = [decayed, scaled, centred]
OF_THE_SUM = [
    *(clipped_by_norm, clipped_together, clipped, signs, one_of_them, adaptive),
    *(finite, numbers, checked, skipped),
]


@pytest.mark.parametrize("change", [*LINEAR, *OF_THE_SUM])
def test_what_is_made_of_the_batchs_gradients_is_trained(change):
    """The weights are those of the stock step on whole batches, up to rounding."""

    def trained(**options):
        keras.utils.set_random_seed(1)
        model = compiled_model(
            lambda: Trained(mean, change, undisturbed),
            lambda: keras.optimizers.SGD(0.1),
            loss=None,
            metrics=None,
        )
        model(X[:16])
        callbacks = [pipelined("gpipe", devices=2)] if options.get("pipeline") else []
        model.fit(X, Y, batch_size=16, verbose=0, shuffle=False, callbacks=callbacks)
        return model.get_weights()

    for stock, parts in zip(trained(), trained(pipeline=True), strict=True):
        np.testing.assert_allclose(parts, stock, rtol=1e-4, atol=1e-6)


def undisturbed():
    parts = [keras.layers.Dense(9, "relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,)), *parts])


@needs_keras_3
def test_other_masks_are_a_note():
    (note,) = [note for note in fit(disturbed, of_each_row).notes if "random numbers" in note]
    assert "for each micro-batch" in note
    assert "dropout" in note


class OfAGraph(keras.Model):
    """Two graph convolutions: the matrix of edges is an input without a row for each example."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(9, "relu"), keras.layers.Dense(3)

    def call(self, inputs):
        edges, x = inputs
        return edges @ self.out(edges @ self.hidden(x))


def _fit_of_a_graph(callbacks, unknown=False):
    keras.utils.set_random_seed(0)
    model = OfAGraph()
    model.compile(adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    edges = np.eye(16, dtype="float32") + np.eye(16, k=1, dtype="float32")
    data = tf.data.Dataset.from_tensors(((edges, X[:16]), Y[:16])).repeat(3)
    if unknown:  # so that it is no trace that fails
        shapes = ((tf.TensorShape([None, None]), tf.TensorShape([None, 7])), tf.TensorShape([None]))
        data = data.map(lambda x, y: tf.nest.map_structure(_unknown, (x, y), shapes))
    model.fit(data, epochs=1, verbose=0, callbacks=callbacks)
    return model


def _unknown(tensor, shape):
    return tf.ensure_shape(tf.py_function(tf.identity, [tensor], tensor.dtype), shape)


@pytest.mark.parametrize("unknown", [False, True])
def test_an_input_without_rows_is_refused(unknown):
    callback = tf_ooo.OOOBackprop(mode="pipeline", devices=2, microbatches=4)
    with pytest.raises(StepRefused, match="no row for each example.*use microbatches=1"):
        _fit_of_a_graph([callback], unknown)


def test_an_input_without_rows_trains_on_one_device_or_in_one_micro_batch():
    stock = _fit_of_a_graph([])
    stays = tf_ooo.OOOBackprop(devices=2, microbatches=4, compare=True)
    assert_equal_bits(_fit_of_a_graph([stays]).get_weights(), stock.get_weights())
    assert "one of its 4 micro-batches" in stays.report.summary()
    _fit_of_a_graph([tf_ooo.OOOBackprop(mode="pipeline", devices=2, microbatches=1)])


@needs_keras_3
@pytest.mark.parametrize("all_optimizers", [False, True], ids=["as_on_cpus", "as_on_gpus"])
@pytest.mark.parametrize("mode", ["auto", "pipeline"])
def test_a_graph_that_tensorflow_cannot_optimize(mode, all_optimizers, monkeypatch):
    """tf.nn.ctc_loss keeps the functions of the first batch size, 16 here, for micro-batches of 4.

    Only the optimizers that are left out on CPUs stumble over that.
    """
    if all_optimizers:
        monkeypatch.setattr(runtime, "calls_without_idle_optimizers", contextlib.nullcontext)
    weights, ours = [], tf_ooo.OOOBackprop(mode=mode, devices=2, microbatches=4, compare=True)
    x = np.sin(np.arange(48 * 24)).reshape(48, 6, 4).astype("float32")
    y = 1 + np.arange(96).reshape(48, 2) % 4
    for callbacks in ([], [ours]):
        keras.utils.set_random_seed(0)
        parts = [keras.layers.Dense(8, "relu"), keras.layers.Dense(5, "softmax")]
        model = keras.Sequential([keras.Input((6, 4)), *parts])
        model.compile("sgd", keras.losses.CTC())
        refused = callbacks and mode == "pipeline" and all_optimizers
        with pytest.raises(BackendError, match="two batch sizes") if refused else contextlib.nullcontext():
            model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append(model.get_weights())
    if mode == "auto" and all_optimizers:
        assert "its own graph optimizers failed" in ours.report.fallback_reason
    if not refused:
        for stock, trained in zip(*weights, strict=True):
            np.testing.assert_allclose(trained, stock, atol=1e-6)
