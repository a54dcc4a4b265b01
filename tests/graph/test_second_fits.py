"""A second fit of the same model runs what the first one has traced, in every mode, to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.plugin import requests
from tests.graph.layerpipe_fit import costs_of
from tests.graph.pipeline_fits import assert_equal_bits
from tests.zoo import keras, needs_keras_3
from tf_ooo.compat import keras_variables
from tf_ooo.modes.layerpipe.fit import LayerPipeMode
from tf_ooo.tracing.variables import values_of

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(40)]

MODES = {
    "single": {"schedule": "fast_forward", "profile_steps": 0},
    "pipeline": {"mode": "pipeline", "devices": 2, "microbatches": 2, "schedule": "1f1b"},
    "layerpipe": {"mode": "layerpipe", "devices": 2, "schedule": "pipedream", "costs": costs_of(4)},
}
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(44, 7)).astype("float32"), RANDOM.normal(size=(44, 3)).astype("float32")


class Counts(keras.layers.Layer):
    """Counts how often it is called, which is while a step is traced."""

    traces = 0

    def call(self, x):
        self.traces += 1
        return x


def model_that_counts():
    keras.utils.set_random_seed(3)
    counts = Counts()
    parts = [keras.layers.Dense(9, activation="relu"), counts, keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((7,)), *parts, keras.layers.Dense(5), keras.layers.Dense(3)])
    compile_anew(model)
    return model, counts


def compile_anew(model):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)


def fit(model, callback, batch_size=8, **data):
    """The last batch has fewer rows."""
    given = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0, **data}
    return model.fit(X, Y, callbacks=[callback], **given).history


def state_of(model):
    return [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]


def set_rate(model):
    model.optimizer.learning_rate = 0.003


def set_weights(model):
    model.set_weights([weight / 2 for weight in model.get_weights()])


def seed_anew(model):
    """TensorFlow optimizes all functions anew after that."""
    keras.utils.set_random_seed(7)


def evaluate(model):
    model.evaluate(X, Y, verbose=0)


def replace_variables(model):
    for variable in model.trainable_variables:
        old = keras_variables.value_of(variable)
        keras_variables.set_value_of(variable, keras_variables.copy_on(old.device, old))


# Between two fits values change, or something is traced besides.
CHANGES = ((set_rate, set_weights), (seed_anew, evaluate))


@pytest.mark.parametrize("mode", MODES)
def test_later_fits_trace_nothing_and_train_as_new_ones(mode):
    ends = []
    for anew in (False, True):
        model, counts = model_that_counts()
        callback = tf_ooo.OOOBackprop(**MODES[mode])
        logs, states = [fit(model, callback)], [state_of(model)]
        traces = counts.traces
        for changes in CHANGES:
            for change in changes:
                change(model)
            logs.append(fit(model, tf_ooo.OOOBackprop(**MODES[mode]) if anew else callback))
            states.append(state_of(model))
        ends.append((states, logs, counts.traces - traces))
    (ours, our_logs, retraced), (fresh, fresh_logs, _) = ends
    assert retraced == 1  # by evaluate
    assert our_logs == fresh_logs
    for one, other in zip(ours, fresh, strict=True):
        assert_equal_bits(one, other)


def assert_devices_hold_nothing(mode, model):
    """The copies on the stages' devices, and what LayerPipe keeps there between rounds, take no memory."""
    spread = isinstance(mode, LayerPipeMode)
    moved = mode.traced.moved if spread else mode.plans.pipeline.placed.moved
    stores = mode.traced.over_rounds.ticks._stores.values() if spread else ()
    copies = [new for *_, new in moved._copies.values()]
    assert copies
    assert not any(held.read_value().shape.num_elements() for held in (*copies, *stores))
    assert {value.device[-5:] for value in values_of(model.variables)} == {"CPU:0"}


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise RuntimeError("stopped here")


@pytest.mark.parametrize("mode", ["pipeline", "layerpipe"])
def test_a_fit_after_one_that_failed_and_what_has_changed_are_traced_again(mode):
    model, counts = model_that_counts()
    callback = tf_ooo.OOOBackprop(**MODES[mode])
    with pytest.raises(RuntimeError, match="stopped here"):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback, Stops()])
    for change in (None, compile_anew, replace_variables):
        before, traces = model.get_weights(), counts.traces
        if change is not None:
            change(model)
        fit(model, callback)
        assert counts.traces > traces
        pairs = zip(before, model.get_weights(), strict=True)
        assert not any(np.array_equal(one, other) for one, other in pairs)
        assert_devices_hold_nothing(callback._life.mode, model)


def test_a_test_function_that_was_taken_away_is_traced_again():
    """So a user has a changed ``test_step``, or an attribute that it reads, count; the train step stays."""
    model, counts = model_that_counts()
    callback, validation = tf_ooo.OOOBackprop(**MODES["pipeline"]), (X, Y)
    fit(model, callback, validation_data=validation)
    traces = counts.traces
    fit(model, callback, validation_data=validation)
    assert counts.traces == traces
    model.test_function = None
    fit(model, callback, validation_data=validation)
    assert 0 < counts.traces - traces <= 2  # a last batch of fewer rows
    evaluate(model)
    traces = counts.traces
    for _ in range(2):
        fit(model, callback, validation_data=validation)
    assert counts.traces == traces


class Evaluates:
    """Calls a ``tf.function``; nobody who looks at this sees it."""

    def __init__(self, model):
        self.step = tf.function(lambda iterator: model.test_step(next(iterator)))

    def __call__(self, iterator):
        return self.step(iterator)


class OwnTest(keras.Sequential):
    def make_test_function(self, force=False):
        if self.test_function is None or force:
            self.test_function = Evaluates(self)
        return self.test_function


@needs_keras_3
def test_a_test_function_that_cannot_be_looked_into_reads_the_moved_weights():
    keras.utils.set_random_seed(3)
    model = OwnTest([keras.Input((7,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    compile_anew(model)
    evaluate(model)
    logs = fit(model, tf_ooo.OOOBackprop(**MODES["pipeline"]), validation_data=(X, Y))
    assert logs["val_loss"][-1] == pytest.approx(model.evaluate(X, Y, verbose=0)[0], rel=1e-4)


def test_other_batches_are_traced_beside_those_before():
    """And no request stays registered between fits."""
    model, counts = model_that_counts()
    callback, there = tf_ooo.OOOBackprop(**MODES["pipeline"]), set(requests._requests)
    for batch_size in (8, 12):
        fit(model, callback, batch_size=batch_size, validation_data=(X, Y))
        assert set(requests._requests) <= there
    traces = counts.traces
    for batch_size in (8, 12):
        fit(model, callback, batch_size=batch_size, validation_data=(X, Y))
        assert set(requests._requests) <= there
    assert counts.traces == traces
