"""Pipelines of models that no device runs whole, not even in the first steps."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_equal_bits, distance, pipelined
from tests.graph.pipeline_models import EVEN, UNEVEN, X, adam, eight_layers, mlp, momentum, normal, whole
from tests.zoo import keras
from tf_ooo.compat import keras_compiled, keras_variables
from tf_ooo.fit import distributed

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(60)]
layers = keras.layers


def fitted(training, schedule="1f1b", callbacks=(), **options):
    """A fit that measures nothing beforehand."""
    settings = {name: options.pop(name) for name in ("epochs",) if name in options}
    return training.piped(pipelined(schedule, **options), *callbacks, measured_before=False, **settings)


@pytest.fixture(name="whole_steps_refused")
def _whole_steps_refused(monkeypatch):
    """A step on one device would be seen."""

    def run_whole(*_):
        raise AssertionError("a step ran whole on one device")

    monkeypatch.setattr(distributed.FirstSteps, "_measured_step", run_whole)
    monkeypatch.setattr(distributed, "stock_steps_s", run_whole)


@functools.cache
def began_whole(schedule):
    training = Training(eight_layers, momentum, UNEVEN, epochs=3)
    return training, fitted(training, schedule, first_steps="whole", check_loss=False)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_v"])
@pytest.mark.parametrize("profile_steps", [0, 3])
def test_the_bits_of_steps_that_began_whole(whole_steps_refused, schedule, profile_steps):
    """With a last batch of another size, and state in the optimizer and the loss."""
    training, whole_first = began_whole(schedule)
    cut = fitted(training, schedule, first_steps="cut", profile_steps=profile_steps)
    assert_equal_bits(whole_first.weights, cut.weights)
    assert_equal_bits(whole_first.state, cut.state)
    assert whole_first.history == cut.history
    assert distance(training.untrained, cut.weights) > 1e-3
    report = cut.report
    assert report.costs.source.startswith("measured" if profile_steps else "analytic")
    assert any("planned again" in note for note in report.notes) == bool(profile_steps)
    assert "not compared: no device is to hold the whole model" in report.summary()


def counting(calls):
    """A layer that notes each time that its forward runs."""

    class Counting(layers.Layer):
        def call(self, x):
            def note(x):
                calls.append(len(x))
                return x

            rows = tf.py_function(note, [tf.stop_gradient(x)], x.dtype)
            return x + tf.reshape(0.0 * rows, tf.shape(x))

    return Counting


def test_nothing_of_the_step_that_is_taken_apart_runs():
    calls = []
    counts = counting(calls)

    def make():
        hidden = [layers.Dense(width, activation="tanh") for width in (9, 11, 13)]
        return keras.Sequential([keras.Input((7,)), *hidden, counts(), layers.Dense(3)])

    training = Training(make, adam, EVEN, epochs=2)
    training.model  # noqa: B018 - its building calls the layers
    calls.clear()
    fitted(training, first_steps="cut", profile_steps=1)
    assert calls == [4] * (2 * 48 // 4)
    assert int(training.model.optimizer.iterations) == 2 * 3


def test_costs_that_were_given_are_taken():
    training = Training(mlp, momentum, EVEN, epochs=1)
    costs = fitted(training, first_steps="whole", profile_steps=1).report.costs
    report = fitted(training, first_steps="cut", costs=costs, profile_steps=2).report
    assert report.costs.layers == costs.layers
    assert not any("planned again" in note for note in report.notes)


# -- planned again --------------------------------------------------------------------------------------


def distorted(monkeypatch, factor):
    """The first costs say that the first layer takes so many times as long."""
    right = distributed.measured_costs

    def wrong(step, profile, timed_s=(), **options):
        costs = right(step, profile, timed_s, **options)
        first, *others = costs.layers
        longer = {name: factor * getattr(first, name) for name in ("forward_s", "weight_grad_s")}
        return dataclasses.replace(costs, layers=(dataclasses.replace(first, **longer), *others))

    monkeypatch.setattr(distributed, "measured_costs", wrong)


def wide():
    """Ops that take some time, in layers of equal work."""
    hidden = [layers.Dense(384, activation="relu") for _ in range(9)]
    return keras.Sequential([keras.Input((384,)), *hidden, layers.Dense(3)])


def test_wrong_costs_are_mended_by_those_that_are_measured(monkeypatch):
    training = Training(wide, momentum, (normal(256, 384), whole(3, 256)), epochs=2, batch_size=64)
    right, given = fitted(training, first_steps="whole", profile_steps=1), {"first_steps": "cut"}
    distorted(monkeypatch, 100.0)
    never_again = fitted(training, **given)
    assert len(never_again.report.pipeline.stages[0]["layers"]) == 1
    mended = fitted(training, profile_steps=3, **given)
    assert len(mended.report.pipeline.stages[0]["layers"]) > 1
    assert any("instead of" in note for note in mended.report.notes)
    for other in (right, never_again):
        assert_equal_bits(other.weights, mended.weights)
        assert_equal_bits(other.state, mended.state)
        assert other.history == mended.history


def test_a_profiler_in_use_leaves_calculated_costs():
    training = Training(mlp, momentum, EVEN, epochs=2)

    class Profiling(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            tf.profiler.experimental.start("")

        def on_train_end(self, logs=None):
            tf.profiler.experimental.stop(save=False)

    given = {"first_steps": "cut", "check_loss": False}
    plain = fitted(training, **given)
    cut = fitted(training, callbacks=[Profiling()], profile_steps=3, **given)
    assert_equal_bits(plain.weights, cut.weights)
    assert any("costs are calculated" in note and "already running" in note for note in cut.report.notes)


# -- when ------------------------------------------------------------------------------------------------


def test_auto_cuts_first_what_exceeds_the_limit(whole_steps_refused):
    """A limit that one device keeps leaves its first steps whole."""
    training = Training(eight_layers, momentum, EVEN, epochs=1)
    free = fitted(training, check_loss=False).report
    assert "no device is to hold" not in free.summary()
    weights_bytes = sum(w.nbytes for w in training.model.get_weights())
    tight = fitted(training, profile_steps=0, memory_limit_bytes=2 * weights_bytes).report
    assert "no device is to hold" in tight.summary()
    roomy = fitted(training, check_loss=False, memory_limit_bytes=100 * weights_bytes).report
    assert "no device is to hold" not in roomy.summary()


def test_a_model_in_host_memory(whole_steps_refused):
    """Weights, the optimizer's state, and the copies that a cluster asks for."""
    with tf_ooo.host_memory():
        training = Training(mlp, adam, EVEN, epochs=2)
        model = training.model
    assert tf_ooo.hosts.memory.in_host_memory(model)
    report = fitted(training, profile_steps=2).report
    assert "no device is to hold" in report.summary()
    states = keras_compiled.state_of(model.optimizer)
    devices = {keras_variables.value_of(variable).device for variable in (*model.variables, *states)}
    assert {device[-5:] for device in devices} == {"CPU:0"}
    outside = Training(mlp, adam, EVEN)
    assert not tf_ooo.hosts.memory.in_host_memory(outside.model)


def test_host_memory_is_asked_for_on_another_device():
    """Machines with GPUs are like this: TensorFlow puts variables on the first."""
    with tf.device("CPU:1"), tf_ooo.host_memory():
        model = keras.Sequential([keras.Input((7,)), layers.Dense(3)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    variables = (*model.variables, *model.optimizer.variables)
    assert {keras_variables.value_of(variable).device[-5:] for variable in variables} == {"CPU:0"}


def test_a_loss_that_adds_up_rows_is_not_looked_at(caplog):
    """On a device that is not to hold the model; in this host's memory it is.  The report says what it is."""

    def summed(y, predicted):
        return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True))

    training = Training(mlp, momentum, EVEN, epochs=1, loss=summed)
    with pytest.raises(tf_ooo.BackendError, match="the loss adds up rows"):
        fitted(training, first_steps="whole")
    on_host = Training(mlp, momentum, EVEN, epochs=1, loss=summed)
    with tf_ooo.host_memory(), pytest.raises(tf_ooo.BackendError, match="the loss adds up rows"):
        fitted(on_host)
    report = fitted(training, first_steps="cut").report
    assert any("check_loss" in note for note in report.notes)
    assert "check_loss" in caplog.text


def test_an_unknown_place_is_refused():
    with pytest.raises(tf_ooo.OptionsError, match="first_steps='hole' is not accepted"):
        tf_ooo.Pipeline(first_steps="hole")


def test_a_step_that_cannot_be_taken_apart_is_refused_before_it_runs():
    training = Training(mlp, momentum, EVEN, epochs=1)
    with pytest.raises(tf_ooo.OptionsError, match="27 stages are more than"):
        fitted(training, "interleaved_1f1b", chunks=9, first_steps="cut")
    assert_equal_bits(training.untrained, training.model.get_weights())


def test_nobody_is_asked_who_has_no_steps_left():
    """A fit of one step: it trained, and nothing was measured."""
    training = Training(mlp, momentum, (X[:16], EVEN[1][:16]), epochs=1)
    report = fitted(training, first_steps="cut", profile_steps=3).report
    assert report.costs.source == "analytic"
    assert np.isfinite(report.predicted_step_s)


def test_a_model_above_the_limit_that_was_not_built_in_host_memory_says_so(caplog):
    """All of it stands on the first device too, whatever the stages take."""

    def wide():
        return keras.Sequential([keras.Input((7,)), *(layers.Dense(128) for _ in range(6)), layers.Dense(3)])

    training = Training(wide, adam, EVEN, epochs=1)
    with pytest.raises(tf_ooo.MemoryLimitError) as refused:
        fitted(training, memory_limit_bytes=1000)
    caplog.clear()
    with tf_ooo.host_memory():
        on_host = Training(wide, adam, EVEN, epochs=1)
        report = fitted(on_host, memory_limit_bytes=refused.value.smallest_bytes).report
    assert not [note for note in report.notes if "host_memory" in note]
    report = fitted(training, memory_limit_bytes=refused.value.smallest_bytes).report
    said = [note for note in report.notes if "not built in tf_ooo.host_memory()" in note]
    assert said == [note for note in said if "CPU:0, above the limit of" in note]
    assert said
    assert said[0] in caplog.text
