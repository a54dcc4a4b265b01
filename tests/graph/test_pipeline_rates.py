"""Learning rates, and other numbers of optimizers, that ``train_step`` or a callback sets, in pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import distance, pipelined
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(90), needs_keras_3]

X = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
Y = X[:, :1] * 3 + 1


class Stepping(keras.Model):
    """Does something before or after its update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = tf.Variable(1.0, trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.before(loss, self.optimizer.learning_rate)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.after(loss, self.optimizer.learning_rate)
        return {"loss": loss}

    def before(self, loss, rate):
        pass

    def after(self, loss, rate):
        pass


class Assigning(Stepping):
    def before(self, loss, rate):
        rate.assign(0.1 / (1 + loss))


class Setting(Stepping):
    def before(self, loss, rate):
        self.optimizer.learning_rate = 0.1 / (1 + loss)


class Choosing(Stepping):
    def before(self, loss, rate):
        tf.cond(loss > 3.0, lambda: rate.assign(0.02), lambda: rate.assign(0.01))


class AssigningAfter(Stepping):
    def after(self, loss, rate):
        rate.assign(0.1 / (1 + loss))


class Weighing(Stepping):
    """Decays weights by the loss."""

    def before(self, loss, rate):
        self.optimizer.weight_decay = 0.1 / (1 + loss)


class Falling(Stepping):
    def before(self, loss, rate):
        rate.assign(rate * 0.95)


class FallingAfter(Stepping):
    def after(self, loss, rate):
        rate.assign(rate * 0.95)


class FallingAtTimes(Stepping):
    def before(self, loss, rate):
        due = self.optimizer.iterations % 3 == 2
        tf.cond(due, lambda: tf.identity(rate.assign(rate * 0.8)), lambda: tf.identity(rate.value))


class FallingByRows(Falling):
    """Needs to know how many rows there are."""

    def train_step(self, data):
        assert int(data[0].shape[0]) > 0
        return super().train_step(data)


class Counting(Stepping):
    """Counts steps by itself."""

    def before(self, loss, rate):
        self.own.assign_add(1.0)
        rate.assign(0.02 / self.own)


class CountingRows(Stepping):
    def before(self, loss, rate):
        self.own.assign_add(tf.cast(self.rows, tf.float32))

    def train_step(self, data):
        self.rows = data[0].shape[0] or tf.shape(data[0])[0]
        return super().train_step(data)


class Averaging(Stepping):
    """Keeps a moving average of its loss."""

    def before(self, loss, rate):
        self.own.assign(0.9 * self.own + 0.1 * loss)


class ByLoss(keras.callbacks.Callback):
    """Sets the learning rate by what is logged of each batch."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs):
        self.losses.append(logs["loss"])
        self.model.optimizer.learning_rate = 0.02 / (1 + logs["loss"])


def built(kind):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(16, "relu")(keras.layers.Dense(16, "relu")(inputs))
    model = kind(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    return model


def trained(model, *callbacks, batch=12):
    """The weights, and the learning rate, after twelve steps or more."""
    model.fit(X, Y, batch_size=batch, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks))
    return [*model.get_weights(), np.float32(model.optimizer.learning_rate)]


def piped(kind, microbatches, **settings):
    """Trained in a pipeline; its report."""
    callback = pipelined("zb_h1", devices=2, microbatches=microbatches)
    return trained(built(kind), callback, **settings), callback.report


@pytest.mark.parametrize("kind", [Assigning, Setting, Choosing, AssigningAfter])
def test_a_rate_that_is_set_by_the_loss_is_refused(kind):
    model = built(kind)
    before = model.get_weights()
    text = r"train_step assigns sgd\w*/learning_rate, of an optimizer, by what it computes from the batch"
    with pytest.raises(BackendError, match=text):
        trained(model, pipelined("zb_h1", devices=2))
    assert distance(before, model.get_weights()) == 0
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02)


def test_a_decay_that_is_set_by_the_loss_is_refused():
    with pytest.raises(BackendError, match=r"train_step sets a number of optimizer 'sgd\w*' by what it comp"):
        piped(Weighing, 4)


@pytest.mark.parametrize("kind", [Assigning, AssigningAfter, Weighing])
def test_in_one_micro_batch_it_is_stocks(kind):
    """Also where the rate changes after the update."""
    ours, _ = piped(kind, 1)
    assert distance(trained(built(kind)), ours) == 0


def test_one_device_trains_such_a_step_where_it_may():
    callback = tf_ooo.OOOBackprop(devices=2, profile_steps=0, microbatches=4)
    ours = trained(built(Assigning), callback)
    assert distance(trained(built(Assigning)), ours) == 0
    assert callback.report.fell_back


@pytest.mark.parametrize("microbatches", [4, 5])
@pytest.mark.parametrize("kind", [Falling, FallingAfter, FallingAtTimes, Counting])
def test_a_rate_that_follows_no_data_changes_once_a_step(kind, microbatches):
    """Five micro-batches of twelve rows are not equal."""
    ours, report = piped(kind, microbatches)
    assert distance(trained(built(kind)), ours) < 1e-6
    assert not any("each micro-batch changes" in note for note in report.notes)


def test_a_variable_that_counts_rows():
    model = built(CountingRows)
    trained(model, pipelined("zb_h1", devices=2))
    assert float(model.own) == 1 + 3 * len(X)


def test_also_in_a_smaller_last_batch():
    """The last batch has ten rows."""
    ours, _ = piped(Falling, 4, batch=19)
    assert distance(trained(built(Falling), batch=19), ours) < 1e-6


def test_micro_batches_of_unequal_size_that_cannot_be_copies_say_so():
    _, report = piped(FallingByRows, 5)
    assert any("/learning_rate, where a stock step does so once" in note for note in report.notes)


def test_a_variable_that_follows_the_loss():
    stock, ours = built(Averaging), built(Averaging)
    expected = trained(stock)
    assert distance(expected, trained(ours, pipelined("zb_h1", devices=2))) < 1e-6
    assert float(ours.own) == pytest.approx(float(stock.own), rel=1e-5)


@pytest.mark.parametrize("batch", [12, 14])
def test_callbacks_read_the_losses_of_stock(batch):
    """Batches of 14 leave one of six rows."""
    stock, ours = ByLoss(), ByLoss()
    expected = trained(built(keras.Model), stock, batch=batch)
    weights = trained(built(keras.Model), ours, pipelined("zb_h1", devices=2), batch=batch)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6)
    assert distance(expected, weights) < 1e-6
