"""States that the forward pass assigns from data change once a step, as in stock training."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(4), pytest.mark.takes(40), needs_keras_3]

RNG = np.random.default_rng(0)
X, Y = RNG.normal(1.0, 1.0, size=(48, 6)).astype("float32"), RNG.normal(size=(48, 1)).astype("float32")
IMAGES = RNG.normal(0.5, 2.0, size=(48, 8, 8, 3)).astype("float32")


class Stateful(keras.layers.Layer):
    """Hands on its inputs; ``make`` its states, by name: shape and type."""

    states: dict[str, tuple] = {}

    def build(self, shape):
        for name, (sizes, dtype) in self.states.items():
            settings = {"trainable": False, "initializer": "zeros", "dtype": dtype, "name": name}
            setattr(self, name, self.add_weight(shape=shape[1:] if sizes is None else sizes, **settings))


class Average(Stateful):
    """Moving averages of its inputs, one of them by a difference that is added, and of their squares."""

    states = {"mean": ((), "float32"), "each": (None, "float32"), "squares": (None, "float32")}

    def call(self, x):
        self.mean.assign_add(0.1 * (keras.ops.mean(x) - self.mean))
        self.each.assign(0.9 * self.each + 0.1 * keras.ops.mean(x, 0))
        self.squares.assign(0.9 * self.squares + 0.1 * keras.ops.mean(x * x, 0))
        return x - keras.ops.stop_gradient(self.each) / 8.0


class AverageBefore(Average):
    """Hands on what depends on the state before the step only."""

    def call(self, x):
        centered = x - self.each / 2.0
        super().call(x)
        return centered


class AverageOnly(Average):
    """Hands on what it is given."""

    def call(self, x):
        super().call(x)
        return x


class Rows(Stateful):
    """Counts rows in two ways, positive numbers, and its calls; keeps the largest input."""

    states = {
        "rows": ((), "int32"),
        "rows_too": ((), "float32"),
        "positive": ((), "int64"),
        "calls": ((), "int32"),
        "most": ((), "float32"),
    }

    def call(self, x):
        self.rows.assign_add(keras.ops.shape(x)[0])
        self.rows_too.assign(self.rows_too + keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        self.positive.assign_add(keras.ops.count_nonzero(x > 0))
        self.calls.assign_add(1)
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(x)))
        return x


class Beside(keras.layers.Layer):
    """Has variables of TensorFlow's beside its weights: an average, a count of calls, one of rows, a seed."""

    def build(self, shape):
        self.average = tf.Variable(tf.zeros(shape[-1]), trainable=False)
        self.calls, self.rows, self.seed = (tf.Variable(0, trainable=False) for _ in range(3))

    def call(self, x):
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x, 0))
        self.calls.assign_add(1)
        self.rows.assign_add(tf.shape(x)[0])
        self.seed.assign_add(1)
        return x + 0.0 * tf.random.stateless_normal(tf.shape(x), [1, self.seed])

    @property
    def states(self):
        return [state.numpy() for state in (self.average, self.calls, self.rows, self.seed)]


class Conditional(Average):
    """Moves its averages where a condition on tensors holds: each micro-batch does."""

    def call(self, x):
        tf.cond(tf.reduce_sum(x) > -1e9, lambda: self._move(x), lambda: False)
        return x

    def _move(self, x):
        super().call(x)
        return True


class Extremes(Stateful):
    """A moving average of the largest input, which no training depends on."""

    states = {"largest": ((), "float32")}

    def call(self, x):
        self.largest.assign(0.9 * self.largest + 0.1 * keras.ops.max(x))
        return x


class Scaled(Extremes):
    """Divides by it, as it was before."""

    def call(self, x):
        return super().call(x / (1.0 + self.largest))


class Codebook(Stateful):
    """Rows move towards the nearest of eight codes, which follow them (van den Oord et al. 2017, A.1)."""

    def build(self, shape):
        codes = np.random.default_rng(1).normal(size=(8, shape[-1]))
        settings = {"trainable": False, "initializer": lambda *_, **__: tf.constant(codes, "float32")}
        self.codes = self.add_weight(shape=codes.shape, name="codes", **settings)
        self.sizes = self.add_weight(shape=(8,), name="sizes", trainable=False, initializer="ones")

    def call(self, x):
        codes = tf.convert_to_tensor(self.codes)
        nearest = tf.one_hot(tf.argmin(tf.norm(x[:, None] - codes, axis=-1), -1), 8)
        self.sizes.assign(0.9 * self.sizes + 0.1 * tf.reduce_sum(nearest, 0))
        sums = tf.matmul(nearest, x, transpose_a=True)
        self.codes.assign(0.9 * codes + 0.1 * sums / self.sizes[:, None])
        return x + tf.stop_gradient(tf.matmul(nearest, codes) - x) / 2.0


def model_with(*layers, rate=0.05, optimizer=keras.optimizers.SGD):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((6,)), dense(9, "tanh"), *layers, dense(9, "tanh"), dense(1)])
    model.compile(optimizer(rate), "mse")
    return model


def pipeline(schedule="gpipe", devices=2, microbatches=4, **options):
    settings = {"schedule": schedule, "devices": devices, "microbatches": microbatches, "profile_steps": 0}
    return tf_ooo.OOOBackprop(tf_ooo.Pipeline(**settings | options))


def fitted(model, *callbacks, batch=16, x=X, epochs=1):
    """Its weights after the fit."""
    model.fit(x, Y, batch_size=batch, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return weights_of(model)


def weights_of(model):
    """Return them by the names behind the model's."""
    return {v.path.partition("/")[2]: v.numpy() for v in model.weights}


def assert_as_stock(stock, ours, rtol=1e-5, atol=1e-6, but=()):
    assert stock.keys() == ours.keys()
    for name, values in stock.items():
        if name.rpartition("/")[2] not in but:
            np.testing.assert_allclose(ours[name], values, rtol=rtol, atol=atol, err_msg=name)


@functools.cache
def stock_after_epochs(batch):
    """Return what stock training leaves after each epoch of a model with two layers that keep states."""
    model, weights = model_with(AverageBefore(), Rows()), []
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: weights.append(weights_of(model)))
    fitted(model, noting, batch=batch, epochs=4)
    return weights


# Micro-batches have 16, 12 and 10 rows; 48 divided by 10 leaves a batch of 8.
@pytest.mark.parametrize("batch", [16, 12, 10])
def test_as_stock(batch):
    callback = pipeline()
    ours = fitted(model_with(AverageBefore(), Rows()), callback, batch=batch, epochs=4)
    assert_as_stock(stock_after_epochs(batch)[3], ours)
    assert callback.report.notes == []
    (rows,) = [value for name, value in ours.items() if name.endswith("/rows")]
    assert rows == 4 * 48


@pytest.mark.parametrize("batch", [16, 10])
def test_an_average_that_is_read_after_its_assignment_is_refused(batch):
    """It is another for each micro-batch."""
    with pytest.raises(BackendError, match="two micro-batches in one"):
        fitted(model_with(Average()), pipeline(), batch=batch)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb_v"},
        {"schedule": "modulo"},
        {"schedule": "1f1b", "devices": 4},
        {"schedule": "1f1b", "devices": 4, "replicas": 2},
        {"schedule": "zb_h1", "first_steps": "cut"},
    ],
    ids=str,
)
def test_in_all_schedules(options):
    ours = fitted(model_with(AverageBefore(), Rows()), pipeline(**options))
    assert_as_stock(stock_after_epochs(16)[0], ours)


def convolutional(rate):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    parts = []
    for filters in (4, 6):
        parts += [layers.Conv2D(filters, 3), layers.BatchNormalization(momentum=0.9), layers.ReLU()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *parts, layers.Flatten(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


@pytest.mark.parametrize("batch", [48, 10])
def test_moving_averages_of_batch_normalization(batch):
    """Weights stay as they are; each step moves the averages once.

    The first layer's inputs are stock's, so are its mean and variance; the second one's are those of rows
    that were normalized with others.
    """
    ours = fitted(convolutional(0.0), pipeline(), batch=batch, x=IMAGES)
    stock = fitted(convolutional(0.0), batch=batch, x=IMAGES)
    assert_as_stock(*({n: v for n, v in each.items() if "_1/" not in n} for each in (stock, ours)))
    for name in ("batch_normalization_1/moving_mean", "batch_normalization_1/moving_variance"):
        np.testing.assert_allclose(ours[name], stock[name], rtol=0.2, atol=0.02)


def test_a_normalization_that_is_called_twice():
    """Each call moves the averages: the second one starts at what the first has left."""

    def shared():
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        inputs, norm = keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.7)
        dense = keras.layers.Dense(9, "tanh")
        parts = [norm(dense(inputs[:, :])), norm(dense(inputs * 2.0))]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(parts)))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    stock, ours = shared(), shared()
    fitted(stock)
    fitted(ours, pipeline())
    expected, mean = ([v.numpy() for v in m.weights if v.name == "moving_mean"] for m in (stock, ours))
    np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


def test_a_later_fit():
    ours, callback = model_with(AverageBefore(), Rows()), pipeline()
    fitted(ours, callback)
    assert_as_stock(stock_after_epochs(16)[1], fitted(ours, callback))


class InTurns(keras.Model):
    """Reads a weight again after its update: micro-batches take turns."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(9, "tanh"), AverageOnly(), Rows(), keras.layers.Dense(1)]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def test_in_turns():
    def made():
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        model = InTurns()
        model(X[:2])
        for variable in model.non_trainable_variables:  # what was counted so far
            variable.assign(keras.ops.zeros_like(variable))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    assert_as_stock(fitted(made()), fitted(made(), pipeline()))


@pytest.mark.parametrize("kind", [Scaled, Codebook])
def test_states_that_training_depends_on_are_refused(kind):
    model = model_with(kind())
    before = model.get_weights()
    with pytest.raises(BackendError, match="assigns to .*(largest|codes|sizes)"):
        fitted(model, pipeline())
    assert all(map(np.array_equal, before, model.get_weights()))


class FromFar(keras.layers.Layer):
    """Scales by the largest number so far, which begins far below all."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer=lambda *_, **__: -1000.0, trainable=False)

    def call(self, x):
        before = tf.nn.relu(tf.convert_to_tensor(self.largest))
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
        return x / (1.0 + before)


def test_a_state_that_begins_far_away_is_compared_by_what_its_parts_say():
    with pytest.raises(BackendError, match="assigns to .*from_far"):
        fitted(model_with(FromFar()), pipeline())


def test_other_states_are_named():
    callback = pipeline()
    stock, ours = fitted(model_with(Extremes())), fitted(model_with(Extremes()), callback)
    assert_as_stock(stock, ours, but=["largest"])
    (note,) = callback.report.notes
    assert "largest" in note
    assert "nothing that is trained depends on it" in note


@pytest.mark.parametrize("batch", [16, 10])
def test_variables_beside_the_weights(batch):
    """Each micro-batch has a seed of its own."""
    stock, ours = Beside(), Beside()
    fitted(model_with(stock), batch=batch)
    fitted(model_with(ours), pipeline(), batch=batch)
    steps = -(-48 // batch)
    for expected, state in zip(stock.states[:3], ours.states, strict=False):
        np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-6)
    assert stock.states[1:] == [steps, 48, steps]
    assert ours.states[3] == 4 * steps


def test_states_that_each_micro_batch_changes_are_named():
    callback = pipeline()
    stock, ours = fitted(model_with(Conditional())), fitted(model_with(Conditional()), callback)
    assert_as_stock(stock, ours, but=["mean", "each", "squares"])
    (note,) = callback.report.notes
    assert "each micro-batch changes" in note
    for name in ("mean", "each", "squares"):
        assert f"conditional/{name}" in note


def test_one_micro_batch_is_stock():
    layers = [AverageBefore, Rows, keras.layers.BatchNormalization, Scaled, Codebook]
    stock = fitted(model_with(*(make() for make in layers)))
    ours = fitted(model_with(*(make() for make in layers)), pipeline(microbatches=1))
    assert_as_stock(stock, ours, rtol=0.0, atol=0.0)


class Unnamed(keras.layers.Layer):
    """Keeps a moving average of the largest input in a variable of TensorFlow's without a name."""

    def __init__(self):
        super().__init__(name="unnamed")
        self.make()

    def make(self):
        self.largest = tf.Variable(0.0, trainable=False)

    def kept(self):
        return self.largest

    def call(self, x):
        largest = self.kept()
        largest.assign(0.9 * largest + 0.1 * tf.reduce_max(x))
        return x


class InADictionary(Unnamed):
    def make(self):
        self.all = {"of": [tf.Variable(0.0, trainable=False) for _ in range(2)]}

    def kept(self):
        return self.all["of"][1]


def outside():
    largest = tf.Variable(0.0, trainable=False)

    class Outside(Unnamed):
        def call(self, x):
            largest.assign(0.9 * largest + 0.1 * tf.reduce_max(x))
            return x

    return Outside()


NAMES = [(Unnamed, "unnamed.largest"), (InADictionary, "unnamed.all['of'][1]"), (outside, "largest")]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_variables_without_a_name_are_called_by_where_they_are_held(kind, name):
    """They were called ``Variable_123``."""
    callback = pipeline()
    fitted(model_with(kind()), callback)
    (note,) = callback.report.notes
    assert note.startswith(f"{name}: what the forward pass assigns")
