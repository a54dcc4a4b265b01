"""Layers that are frozen or thawed after compile: every mode trains what stock Keras trains."""

from __future__ import annotations

import copy
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
    },
}


class FlipAtEpoch(keras.callbacks.Callback):
    def __init__(self, flip, at=1):
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


def trained(flip, options, stock_first=False, within=False):
    model = model_of_three()

    def fit(callbacks, epochs=1):
        model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)

    ours = [] if options is None else [tf_ooo.OOOBackprop(**options)]
    if within:
        fit([*ours, FlipAtEpoch(flip)], epochs=3)
    else:
        fit([] if stock_first else ours)
        flip(model)
        fit(ours)
    flags = [layer.trainable for layer in model.layers]
    return model.get_weights(), flags


WAYS = [
    (flip, way)
    for flip in (freeze, thaw, freeze_again)
    for way in ("stock-first", "ours-first", "within")
    if (flip, way) != (freeze_again, "within")  # nobody compiles within fit
]


@pytest.mark.parametrize(("flip", "way"), WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_trains_as_stock(mode, flip, way):
    settings = {"stock_first": way == "stock-first", "within": way == "within"}
    (stock, stock_flags), (ours, flags) = (trained(flip, each, **settings) for each in (None, MODES[mode]))
    assert flags == stock_flags
    for expected, weights in zip(stock, ours, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


def trained_without_us_later(before, options, steps):
    """The weights of a model after a fit by us, or without, and ``steps`` that stock Keras runs."""
    model = model_of_three()
    callbacks = [] if options is None else [tf_ooo.OOOBackprop(**options)]
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, callbacks=callbacks)
    before(model)
    steps(model)
    return model


def give_another_optimizer(model):
    model.optimizer = keras.optimizers.SGD(0.5)


def fit_again(model):
    model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)


def train_on_batch(model):
    model.train_on_batch(X[:8], Y[:8])


def make_function_and_fit(model):
    model.make_train_function(force=True)
    fit_again(model)


def load_and_fit(model):
    """Fit after weights were set, as from a file."""
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    fit_again(model)


LATER = [
    *((flip, fit_again) for flip in (freeze, thaw, freeze_again, give_another_optimizer)),
    *((freeze, steps) for steps in (train_on_batch, make_function_and_fit, load_and_fit)),
]


@pytest.mark.parametrize(("before", "steps"), LATER)
@pytest.mark.parametrize("mode", MODES)
def test_stock_steps_after_ours_train_as_after_stock(mode, before, steps):
    """Stock Keras would have traced its step in the first fit: it traces it later with the flags of then."""
    stock, ours = (trained_without_us_later(before, options, steps) for options in (None, MODES[mode]))
    for expected, weights in zip(stock.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)
    assert stock.optimizer.iterations.numpy() == ours.optimizer.iterations.numpy()


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_of_a_model_that_we_trained_is_one_of_its_own(mode, tmp_path):
    """No copy and no file has what the model remembers of its step."""
    model = trained_without_us_later(freeze, MODES[mode], lambda model: None)
    model.save(tmp_path / "model.keras")
    copies = [keras.models.load_model(tmp_path / "model.keras"), pickle.loads(pickle.dumps(model))]
    for copied in [*copies, copy.deepcopy(model)]:
        fit_again(copied)
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


def freeze_and_compile_with_the_same_optimizer(model, fit):
    fit([])
    freeze(model)
    model.compile(model.optimizer, "mse")
    fit([])


def freeze_after_train_on_batch(model, fit):
    model.train_on_batch(X[:8], Y[:8])
    freeze(model)


def freeze_after_fit(model, fit):
    fit([])
    freeze(model)


def freeze_all(model, fit):
    fit([])
    model.trainable = False


BEFORE = [
    (keras.Model, freeze_and_compile_with_the_same_optimizer),
    (keras.Model, freeze_after_train_on_batch),
    (keras.Model, freeze_all),
    (OwnStep, freeze_after_fit),
]


@pytest.mark.parametrize(("kind", "before"), BEFORE)
@pytest.mark.parametrize("mode", ["single", "pipeline"])
def test_what_stock_steps_have_fixed(mode, kind, before):
    weights, ours = [], tf_ooo.OOOBackprop(**MODES[mode])
    for callbacks in ([], [ours]):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh", name="middle")(inputs)
        model = kind(inputs, keras.layers.Dense(2)(keras.layers.Dense(4)(hidden)))
        model.compile("adam", "mse")

        def fit(given, model=model):
            model.fit(X, Y, batch_size=8, verbose=0, shuffle=False, callbacks=given)

        before(model, fit)
        fit(callbacks)
        weights.append(model.get_weights())
    assert not ours.report.fell_back, ours.report.fallback_reason
    for expected, trained_weights in zip(*weights, strict=True):
        np.testing.assert_allclose(trained_weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flip", [freeze, thaw])
@pytest.mark.parametrize("mode", MODES)
def test_a_flip_before_the_first_step_counts(mode, flip):
    """Stock's step is traced after callbacks have begun the epoch."""
    weights = []
    for ours in ([], [tf_ooo.OOOBackprop(**MODES[mode])]):
        model = model_of_three()
        callbacks = [*ours, FlipAtEpoch(flip, at=0)]
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append(model.get_weights())
    for expected, trained_weights in zip(*weights, strict=True):
        np.testing.assert_allclose(trained_weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("flip", "way"), WAYS)
def test_late_gradients_train_the_same_weights(flip, way):
    """LayerPipe's weights are others than stock's, since gradients come late; the same ones move."""
    settings = {"stock_first": way == "stock-first", "within": way == "within"}
    layerpipe = {"mode": "layerpipe", "devices": 2, "profile_steps": 1}
    moved = []
    for options in (None, layerpipe):
        before = model_of_three().get_weights()
        weights, _ = trained(flip, options, **settings)
        moved.append([not np.array_equal(old, new) for old, new in zip(before, weights, strict=True)])
    assert moved[0] == moved[1]
    assert True in moved[0]


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
    saved = {}
    for title, callbacks in {"stock": [], "ours": [tf_ooo.OOOBackprop(**MODES[mode])]}.items():
        keras.backend.clear_session()
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
        saved[title] = groups_of(model, tmp_path / f"{title}.weights.h5")
        model.load_weights(tmp_path / f"{title}.weights.h5")
    assert saved["ours"] == saved["stock"]
