"""Layers that are frozen or thawed after compile: every mode trains what stock Keras trains."""

from __future__ import annotations

import copy
import functools
import pickle

import h5py
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError
from tf_ooo.modes.data_parallel.fit import check_model

pytestmark = [pytest.mark.devices(2), needs_keras_3]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype("float32")
Y = RNG.normal(size=(32, 2)).astype("float32")
MODES = {
    "single": {"schedule": "fast_forward", "profile_steps": 0},
    "auto": {},
    "pipeline": {
        "mode": "pipeline",
        "devices": 2,
        "microbatches": 2,
        "schedule": "gpipe",
        "profile_steps": 1,
        "compare": False,
    },
}

FLIPPED_AT = {"at-once": 0, "within": 1}
LAYERPIPE = {"mode": "layerpipe", "devices": 2, "schedule": "pipedream", "profile_steps": 1, "compare": False}


class FlipAtEpoch(keras.callbacks.Callback):
    def __init__(self, flip, at):
        super().__init__()
        self.flip, self.at = flip, at

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.at:
            self.flip(self.model)


def freeze(model):
    model.get_layer("middle").trainable = False


def thaw(model):
    model.get_layer("first").trainable = True


def freeze_again(model):
    freeze(model)
    model.compile("adam", "mse")


def model_of_three():
    """Its first layer is frozen."""
    keras.utils.set_random_seed(1)
    named = [keras.layers.Dense(5, "tanh", name=name) for name in ("first", "middle", "last")]
    model = keras.Sequential([keras.Input((6,)), *named, keras.layers.Dense(2)])
    model.get_layer("first").trainable = False
    model.compile("adam", "mse")
    return model


def fit(model, callbacks=(), epochs=1):
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def callbacks_of(options):
    return [] if options is None else [tf_ooo.OOOBackprop(**options)]


def assert_as_stock(stock, ours):
    for expected, weights in zip(stock, ours, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


def trained(flip, options, way):
    model, ours = model_of_three(), callbacks_of(options)
    if way in FLIPPED_AT:
        fit(model, [*ours, FlipAtEpoch(flip, FLIPPED_AT[way])], epochs=3)
    else:
        fit(model, [] if way == "stock-first" else ours)
        flip(model)
        fit(model, ours)
    flags = [layer.trainable for layer in model.layers]
    return model.get_weights(), flags


stock_trained = functools.cache(functools.partial(trained, options=None))


WAYS = [
    (flip, way)
    for flip in (freeze, thaw, freeze_again)
    for way in ("stock-first", "ours-first", "within")
    if (flip, way) != (freeze_again, "within")  # nobody compiles within fit
]
# Stock's step is traced after callbacks have begun the first epoch.
AT_ONCE = [(freeze, "at-once"), (thaw, "at-once")]


@pytest.mark.parametrize(("flip", "way"), [*WAYS, *AT_ONCE])
@pytest.mark.parametrize("mode", MODES)
def test_trains_as_stock(mode, flip, way):
    stock, stock_flags = stock_trained(flip=flip, way=way)
    ours, flags = trained(flip, MODES[mode], way)
    assert flags == stock_flags
    assert_as_stock(stock, ours)


def trained_without_us_later(before, options, steps):
    """The weights of a model after a fit by us, or without, and ``steps`` that stock Keras runs."""
    model = model_of_three()
    fit(model, callbacks_of(options))
    before(model)
    steps(model)
    return model


stock_later = functools.cache(functools.partial(trained_without_us_later, options=None))


def give_another_optimizer(model):
    model.optimizer = keras.optimizers.SGD(0.5)


def train_on_batch(model):
    model.train_on_batch(X[:8], Y[:8])


def make_function_and_fit(model):
    model.make_train_function(force=True)
    fit(model)


def load_and_fit(model):
    """Fit after weights were set, as from a file."""
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    fit(model)


LATER = [
    *((flip, fit) for flip in (freeze, thaw, freeze_again, give_another_optimizer)),
    *((freeze, steps) for steps in (train_on_batch, make_function_and_fit, load_and_fit)),
]


@pytest.mark.parametrize(("before", "steps"), LATER)
@pytest.mark.parametrize("mode", MODES)
def test_stock_steps_after_ours_train_as_after_stock(mode, before, steps):
    """Stock Keras would have traced its step in the first fit: it traces it later with the flags of then."""
    stock = stock_later(before=before, steps=steps)
    ours = trained_without_us_later(before, MODES[mode], steps)
    assert_as_stock(stock.get_weights(), ours.get_weights())
    assert stock.optimizer.iterations.numpy() == ours.optimizer.iterations.numpy()


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_model_that_we_trained_is_one_of_its_own(mode, tmp_path):
    """No copy and no file has what the model remembers of its step."""
    model = trained_without_us_later(freeze, MODES[mode], lambda model: None)
    model.save(tmp_path / "model.keras")
    copies = [keras.models.load_model(tmp_path / "model.keras"), pickle.loads(pickle.dumps(model))]
    for copied in [*copies, copy.deepcopy(model)]:
        fit(copied)
        before, weights = model.get_layer("middle").get_weights(), copied.get_layer("middle").get_weights()
        assert np.array_equal(before[0], weights[0])


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def compile_with_the_same_optimizer(model):
    model.compile(model.optimizer, "mse")


def freeze_all(model):
    model.trainable = False


BEFORE = [
    pytest.param(keras.Model, (fit, freeze, compile_with_the_same_optimizer, fit), id="compiled_again"),
    pytest.param(keras.Model, (train_on_batch, freeze), id="train_on_batch"),
    pytest.param(keras.Model, (fit, freeze_all), id="all"),
    pytest.param(OwnStep, (fit, freeze), id="own_step"),
]


@pytest.mark.parametrize(("kind", "before"), BEFORE)
@pytest.mark.parametrize("mode", ["single", "pipeline"])
def test_what_stock_steps_have_fixed(mode, kind, before):
    ours = tf_ooo.OOOBackprop(**MODES[mode] | {"compare": None})
    weights = trained_behind(kind, before, [ours])
    assert not ours.report.fell_back, ours.report.fallback_reason
    assert_as_stock(stock_behind(kind, before), weights)


def trained_behind(kind, before, callbacks=()):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(5, "tanh", name="middle")(inputs)
    model = kind(inputs, keras.layers.Dense(2)(keras.layers.Dense(4)(hidden)))
    model.compile("adam", "mse")
    for change in before:
        change(model)
    fit(model, callbacks)
    return model.get_weights()


stock_behind = functools.cache(trained_behind)


@pytest.mark.parametrize(("flip", "way"), WAYS)
def test_late_gradients_train_the_same_weights(flip, way):
    """LayerPipe's weights are others than stock's, since gradients come late; the same ones move."""
    before = model_of_three().get_weights()
    stock, ours = (
        [not np.array_equal(old, new) for old, new in zip(before, weights, strict=True)]
        for weights, _ in (stock_trained(flip=flip, way=way), trained(flip, LAYERPIPE, way))
    )
    assert ours == stock
    assert True in stock


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stock_first", [True, False], ids=["stock-first", "ours-first"])
def test_another_optimizer_is_for_another_compile(mode, stock_first):
    """Stock goes on with the optimizer of its trace: so do we, or we refuse before the first step."""
    model, callback = model_of_three(), tf_ooo.OOOBackprop(**MODES[mode])
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[] if stock_first else [callback])
    before, model.optimizer = model.optimizer, keras.optimizers.SGD()
    weights = model.get_weights()
    if mode == "pipeline":
        with pytest.raises(BackendError, match="call model.compile"):
            model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
        for expected, left in zip(weights, model.get_weights(), strict=True):
            assert np.array_equal(expected, left)
    else:
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
        assert int(before.iterations.numpy()) == 8
        assert int(model.optimizer.iterations.numpy()) == 0
        assert ("call model.compile" in callback.report.fallback_reason) == stock_first
    model.compile(model.optimizer, "mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.numpy()) == 4


def test_ranks_refuse_another_optimizer():
    model = model_of_three()
    model.fit(X, Y, batch_size=8, verbose=0)
    check_model(model)
    model.optimizer = keras.optimizers.SGD()
    with pytest.raises(BackendError, match="call model.compile"):
        check_model(model)


def groups_of(model, path):
    """Return what a file of weights has in it, as Keras walks through the model's attributes."""
    model.save_weights(path)
    with h5py.File(path) as file:
        names: list[str] = []
        file.visit(names.append)
    return names


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_saved_and_loaded_after_a_fit_as_in_stock(tmp_path, mode):
    """Whatever the model remembers of its step is none of its state: loading recursed without an end."""
    saved = []
    for options in (None, MODES[mode]):
        keras.backend.clear_session()
        model = model_of_three()
        fit(model, callbacks_of(options))
        saved.append(groups_of(model, tmp_path / "model.weights.h5"))
        model.load_weights(tmp_path / "model.weights.h5")
    assert saved[0] == saved[1]
