"""Loss scaling in pipelines: float16 gradients overflow, and updates are skipped, where stock's are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import distance, pipelined
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(90), needs_keras_3]

X = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
Y = X[:, :1] * 3 + 1
OF_HALF = 1e-2  # of 16 steps: float16 has three digits, and so have its sums


@pytest.fixture(autouse=True)
def _mixed_float16():
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


class Scaling(keras.Model):
    """Scales its loss by hand."""

    def train_step(self, data):
        loss, scaled, grads = self.gradients(*data)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss, "scaled": scaled}

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), tf.float32) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        return loss, scaled, tape.gradient(scaled, self.trainable_variables)


class Clipping(Scaling):
    """Changes a weight after its update: micro-batches take turns."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.trainable_variables[0].assign(tf.clip_by_value(self.trainable_variables[0], -1.0, 1.0))
        return logs


class ByHand(Scaling):
    """Scales without its optimizer's method."""

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), tf.float32) - y) ** 2)
            scaled = loss * 2.0**15
        return loss, scaled, tape.gradient(scaled, self.trainable_variables)


class PlainToo(Scaling):
    """Gives half of its gradients without scaling."""

    def gradients(self, x, y):
        weights = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), tf.float32) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        return loss, scaled, [*tape.gradient(scaled, weights[:2]), *tape.gradient(loss, weights[2:])]


def dense(units, **settings):
    return keras.layers.Dense(units, "relu", **settings)


def mlp(kind=keras.Model, **settings):
    inputs = keras.Input((8,))
    hidden = dense(16, **settings)(dense(16, **settings)(inputs))
    return kind(inputs, keras.layers.Dense(1)(hidden))


def called_twice():
    """The gradients of a shared kernel, and of its regularizer, are added up in float32."""
    shared, inputs = dense(8, kernel_regularizer=keras.regularizers.L2(1e-3)), keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(1)(shared(shared(inputs))))


def convolution():
    layers = [keras.layers.Reshape((8, 1)), keras.layers.Conv1D(8, 3, activation="relu")]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)])


def of_half():
    """Its weights are float16 numbers, and so are sums of their gradients."""
    return mlp(dtype="float16")


@dataclass
class Step:
    """Holds what a step left; ``scale`` with the counts of steps since it grew and of updates."""

    scale: tuple[float, int, int]
    loss: float
    weights: list[np.ndarray]


def steps_of(make, *callbacks, batch=24, initial_scale=2.0**18, **settings):
    """Return what each of 16 steps left; the scale grows after six of finite gradients."""
    keras.utils.set_random_seed(1)
    model = make()
    sgd = keras.optimizers.SGD(0.01, momentum=0.9, **settings)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale, dynamic_growth_steps=6)
    model.compile(optimizer, "mse")
    steps = []

    def note(batch, logs):
        counts = optimizer.step_counter, optimizer.iterations
        scale = (float(optimizer.dynamic_scale), *map(int, counts))
        steps.append(Step(scale, logs["loss"], [np.copy(weight) for weight in model.get_weights()]))

    callbacks = [*callbacks, keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    model.fit(X, Y, batch_size=batch, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    return steps


def assert_as_stock(make, schedule="zb_h1", microbatches=4, replicas=1, initial_scale=2.0**18, **settings):
    settings |= {"initial_scale": initial_scale}
    stock = steps_of(make, **settings)
    callback = pipelined(schedule, devices=2, microbatches=microbatches, replicas=replicas)
    ours = steps_of(make, callback, **settings)
    scales = [step.scale for step in stock]
    assert [step.scale for step in ours] == scales
    assert min(scales)[0] < initial_scale, "no overflow: nothing is tested"
    for expected, step in zip(stock, ours, strict=True):
        assert step.loss == pytest.approx(expected.loss, rel=1e-2)
        assert distance(expected.weights, step.weights) < OF_HALF
    assert not callback.report.fell_back


@pytest.mark.parametrize(
    ("microbatches", "initial_scale"), [(2, 2.0**15), (8, 2.0**15), (4, 2.0**22), (5, 2.0**22)]
)
def test_micro_batches(microbatches, initial_scale):
    """With five, rows are not equal."""
    assert_as_stock(mlp, microbatches=microbatches, initial_scale=initial_scale)


@pytest.mark.parametrize("make", [called_twice, convolution, of_half])
def test_layers(make):
    assert_as_stock(make, initial_scale=2.0**20)


@pytest.mark.parametrize("batch", [24, 20])
@pytest.mark.parametrize("kind", [Scaling, Clipping])
def test_train_steps_that_scale(kind, batch):
    """Batches of 20 leave one of 16 rows."""
    assert_as_stock(lambda: mlp(kind), batch=batch)


def test_accumulation():
    assert_as_stock(mlp, gradient_accumulation_steps=2)


def test_replicas():
    assert_as_stock(mlp, "1f1b", replicas=2)


def test_the_log_of_a_scaled_loss_is_the_batchs():
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs))
    steps_of(lambda: mlp(Scaling), note, pipelined("gpipe", devices=2), initial_scale=2.0**15)
    assert seen[0]["scaled"] == pytest.approx(seen[0]["loss"] * 2**15, rel=1e-3)


def test_losses_of_which_some_are_scaled():
    with pytest.raises(
        BackendError, match="of a loss that scale_loss has scaled, and of one that it has not"
    ):
        steps_of(lambda: mlp(PlainToo), pipelined("gpipe", devices=2, check_loss=False))


def test_a_loss_that_is_scaled_by_hand_is_said():
    callback = pipelined("gpipe", devices=2)
    steps_of(lambda: mlp(ByHand), callback)
    assert any("train_step does not scale its loss by scale_loss" in note for note in callback.report.notes)


def test_a_fixed_scale():
    """``loss_scale_factor`` of an optimizer: nothing is skipped, and float16 numbers are stock's."""

    def weights(*callbacks):
        keras.utils.set_random_seed(1)
        model = mlp()
        model.compile(keras.optimizers.SGD(0.01, loss_scale_factor=2.0**11), "mse", auto_scale_loss=False)
        model.fit(X, Y, batch_size=24, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    stock, ours = weights(), weights(pipelined("gpipe", devices=2))
    assert np.isfinite(stock[0]).all()
    assert distance(stock, ours) < OF_HALF
