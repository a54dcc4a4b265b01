"""Train steps of one's own in a pipeline: what they log, where they update; on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import assert_equal_bits, pipelined
from tests.graph.pipeline_models import X
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(30), needs_keras_3]

TARGETS = X[:, :1]


class Stepping(keras.Model):
    """Computes a loss by hand."""

    def train_step(self, data):
        loss, grads = self.gradients(*data)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"own": loss}

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        return loss, tape.gradient(loss, self.trainable_variables)


class Rates(keras.Model):
    def train_step(self, data):
        logs, own = super().train_step(data), self.optimizer
        more = {"number": 1.5, "array": np.float32(2), "steps": own.iterations.value}
        return {**logs, **more, "rate": own.learning_rate, "after": tf.cast(own.iterations, tf.float32) + 0}


class Whiling(Stepping):
    def train_step(self, data):
        def body(number, _):
            return number + 1, super(Whiling, self).train_step(data)["own"]

        return {"own": tf.while_loop(lambda number, _: number < 3, body, [0, 0.0])[1]}


class Mapping(Stepping):
    def train_step(self, data):
        def of_row(row):
            return super(Mapping, self).train_step([part[None] for part in row])["own"]

        return {"own": tf.reduce_mean(tf.map_fn(of_row, data, fn_output_signature=tf.float32))}


class Conditional(Stepping):
    def train_step(self, data):
        train = super().train_step
        return {"own": tf.cond(self.optimizer.iterations < 2, lambda: train(data)["own"], lambda: 0.0)}


class Nested(Stepping):
    @tf.function
    def update(self, data):
        return super().train_step(data)

    def train_step(self, data):
        return self.update(data)


class ByHand(Stepping):
    """Adds up gradients of two steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables]
        self.seen = tf.Variable(0.0, trainable=False)

    def train_step(self, data):
        loss, grads = self.gradients(*data)
        now = self.seen.assign(1.0 - self.seen)
        for total, grad in zip(self.sums, grads, strict=True):
            total.assign_add(grad)
        pairs = zip(self.sums, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(total * (1.0 - now), variable) for total, variable in pairs])
        return {"own": loss}


def made(kind, optimizer="adam", loss=None):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    model = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(inputs)))
    model.compile(optimizer() if callable(optimizer) else optimizer, loss)
    return model


def fitted(model, *callbacks, targets=TARGETS):
    settings = {"batch_size": 16, "epochs": 2, "verbose": 0, "shuffle": False}
    return model.fit(X, targets, callbacks=list(callbacks), **settings).history


def decaying():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5))


@pytest.mark.parametrize(
    "optimizer", [pytest.param("adam", id="variable"), pytest.param(decaying, id="rate")]
)
def test_variables_and_numbers_in_logs(optimizer):
    """They are those after the update, as in stock training."""
    stock = fitted(made(Rates, optimizer, "mse"))
    ours = fitted(made(Rates, optimizer, "mse"), pipelined("zb_h1"))
    assert set(stock) == set(ours)
    for key in stock:
        np.testing.assert_allclose(ours[key], stock[key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("kind", [Whiling, Mapping, Conditional, Nested])
def test_updates_in_a_graph_of_their_own_are_refused(kind):
    model = made(kind)
    before = model.get_weights()
    with pytest.raises(BackendError, match="inside a loop or a condition on tensors"):
        fitted(model, pipelined("zb_h1"))
    assert_equal_bits(before, model.get_weights())


def test_a_refused_function_of_the_model_trains_in_stock():
    """Its trace had been made while updates were intercepted: stock training went on without them."""
    model = made(Nested)
    with pytest.raises(BackendError):
        fitted(model, pipelined("zb_h1"))
    fitted(model)
    assert int(model.optimizer.iterations) == 2 * -(-len(X) // 16)


def test_gradients_that_are_added_up_by_hand_are_refused():
    model = made(ByHand)
    before = model.get_weights()
    with pytest.raises(BackendError, match="adds up gradients of several steps by hand") as raised:
        fitted(model, pipelined("zb_h1"))
    assert f"in a variable of its own ({model.name}.sums[" in str(raised.value)
    assert_equal_bits(before, model.get_weights())


class SharpnessAware(Stepping):
    """Takes the gradient where another gradient leads (SAM, Foret et al. 2021)."""

    def train_step(self, data):
        loss, grads = self.gradients(*data)
        moves = [grad * 0.05 / tf.linalg.global_norm(grads) for grad in grads]
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_add(move)
        _, grads = self.gradients(*data)
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"own": loss}


def test_weights_moved_by_a_gradient_are_refused_for_that_reason():
    model = made(SharpnessAware)
    before = model.get_weights()
    with pytest.raises(BackendError, match="moves weights by a gradient.*as SAM does") as raised:
        fitted(model, pipelined("zb_h1"))
    assert "rows" not in str(raised.value)
    assert_equal_bits(before, model.get_weights())


class Halves(keras.Model):
    """Each layer has an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = keras.layers.Dense(8, "relu"), keras.layers.Dense(2)
        self.second = keras.optimizers.SGD(0.05)

    def call(self, x):
        return self.b(self.a(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, [self.a.trainable_variables, self.b.trainable_variables])
        self.optimizer.apply(grads[0], self.a.trainable_variables)
        self.second.apply(grads[1], self.b.trainable_variables)
        return {"own": loss}


def test_an_optimizer_has_slots_for_what_it_trains():
    sizes = []
    for callbacks in ([], [pipelined("zb_h1")]):
        model = Halves()
        model(X[:2])
        model.compile("adam")
        fitted(model, *callbacks, targets=X[:, :2])
        sizes.append(len(model.optimizer.variables))
    assert sizes[0] == sizes[1]


class Weighted(keras.Model):
    """Has a weight of its own, and layers that are not built when it says so."""

    def __init__(self):
        super().__init__()
        self.a, self.b = keras.layers.Dense(7, "relu"), keras.layers.Dense(2)
        self.t = self.add_weight(shape=(1,), name="t", initializer="zeros")

    def call(self, x):
        return self.b(self.a(x)) + self.t


@pytest.mark.filterwarnings("ignore:`build:UserWarning")
@pytest.mark.parametrize("mode", ["pipeline", "layerpipe"])
def test_a_model_whose_layers_are_not_built(mode):
    def trained(*callbacks):
        keras.utils.set_random_seed(1)
        model = Weighted()
        model.build((None, *X.shape[1:]))
        model.compile("adam", "mse")
        return fitted(model, *callbacks, targets=X[:, :2])["loss"]

    callback = pipelined("zb_h1") if mode == "pipeline" else tf_ooo.OOOBackprop(mode=mode, devices=2)
    np.testing.assert_allclose(trained(callback), trained(), rtol=1e-5 if mode == "pipeline" else 0.05)


class Counting(Stepping):
    def train_step(self, data):
        x, y = data
        right = (self(x) > 0) == (y > 0)
        logs = super().train_step(data)
        count = tf.reduce_sum(tf.cast(right, tf.int32))
        largest = {"largest": tf.reduce_max(x), "least": tf.reduce_min(x[:, 0])}
        return {
            **logs,
            **largest,
            "rows": tf.shape(x)[0],
            "right": count,
            "right_f": tf.cast(count, "float32"),
        }


def test_logs_that_are_no_mean():
    stock, ours = fitted(made(Counting)), fitted(made(Counting), pipelined("zb_h1"))
    for key in stock:
        np.testing.assert_allclose(ours[key], stock[key], rtol=1e-5, err_msg=key)


class Noisy(Stepping):
    def gradients(self, x, y):
        return super().gradients(x + 0.1 * tf.random.normal(tf.shape(x)), y)


def test_random_numbers_of_ones_own_are_said():
    """No layer of Keras draws them."""
    callback = pipelined("zb_h1")
    fitted(made(Noisy), callback)
    assert any("random numbers are drawn for each micro-batch" in note for note in callback.report.notes)
    assert "RandomStandardNormal" in callback.report.summary()
    callback = pipelined("zb_h1")
    fitted(made(Stepping), callback)
    assert "random numbers" not in callback.report.summary()


class Norms(Stepping):
    def train_step(self, data):
        loss, grads = self.gradients(*data)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"own": loss, "norm": tf.linalg.global_norm(grads)}


def test_each_fit_s_report_says_which_log_is_not_the_batch_s_own():
    for _ in range(2):  # of a second model in the same process, too
        callback = pipelined("zb_h1")
        fitted(made(Norms), callback)
        (note,) = [note for note in callback.report.notes if "micro-batches' values" in note]
        assert note.startswith("the log norm is the mean of its micro-batches' values")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mode": "pipeline", "microbatches": 4, "schedule": "zb_h1"}, id="pipeline"),
        pytest.param({"mode": "layerpipe"}, id="layerpipe"),
    ],
)
def test_a_model_without_weights_is_told_so(options):
    """Stock Keras warns, and trains nothing; it is no train_step without an optimizer."""
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, keras.layers.Dropout(0.5)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(BackendError, match="no trainable weights"):
        fitted(model, tf_ooo.OOOBackprop(**options, devices=2, profile_steps=0), targets=X)


@pytest.mark.parametrize("refused", ["sum", "compiled", "optimizer"])
def test_devices_stay_on_one_where_a_pipeline_refuses_the_model(refused):
    """Nobody asked for a pipeline: ``devices=`` lets it be found out."""
    weights, ours = [], tf_ooo.OOOBackprop(devices=2, microbatches=4, compare=True)
    for callbacks in ([], [ours]):
        loss = keras.losses.MeanSquaredError(reduction="sum" if refused == "sum" else "sum_over_batch_size")
        model = made(keras.Model, loss=loss)
        model.jit_compile = refused == "compiled"
        if refused == "optimizer":
            fitted(model)
            model.optimizer = keras.optimizers.SGD(0.1)
        fitted(model, *callbacks)
        weights.append(model.get_weights())
    assert_equal_bits(*weights)
    assert "mode='pipeline'" in ours.report.fallback_reason or "adds up rows" in ours.report.fallback_reason


class Function(Conditional):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def test_the_advice_comes_first_where_autograph_has_converted_the_step():
    with pytest.raises(BackendError) as raised:
        fitted(made(Function), pipelined("zb_h1"))
    assert str(raised.value).startswith("train_step applies gradients inside a loop or a condition")


@pytest.mark.parametrize("options", [{"mode": "pipeline", "microbatches": 2, "schedule": "gpipe"}, {}])
def test_a_layer_that_trains(options):
    """Keras' own tests train layers with its trainer, which have no ``save``."""
    trainer = next(base for base in keras.Model.__mro__ if "fit" in vars(base))

    class Training(trainer, keras.layers.Layer):
        def __init__(self):
            keras.layers.Layer.__init__(self)
            trainer.__init__(self)
            self.first, self.last = keras.layers.Dense(5), keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.first(x))

    histories = []
    for callbacks in ([], [tf_ooo.OOOBackprop(**options, profile_steps=0)]):
        keras.utils.set_random_seed(1)
        model = Training()
        model.compile("sgd", "mse")
        histories.append(fitted(model, *callbacks)["loss"])
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)
