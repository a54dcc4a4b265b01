"""OOOBackprop beside what else ``fit`` does: validation, partial batches, resuming, logging."""

from __future__ import annotations

import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from keras_callbacks import TimelineLogger
from tests import zoo
from tests.same_bits import assert_ordered
from tf_ooo.fit import timing

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6)).astype("float32")
Y = RNG.integers(0, 3, 48)


class Net(keras.Model):
    """Not built before its first batch."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(8, activation="tanh")
        self.second = keras.layers.Dense(3)

    def call(self, x):
        return self.second(self.first(x))


def functional(trainable=True):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    model.trainable = trainable
    return model


def compiled(build=functional, **options):
    keras.utils.set_random_seed(3)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False, **options)
    if model.built and zoo.KERAS_3:
        zoo.make_variables(model, X, Y)
    return model


def fit(model, *callbacks, count=48, batch_size=8, epochs=2, **options):
    keras.utils.set_random_seed(4)  # Keras 2 draws the weights of a model without a shape now
    return model.fit(
        X[:count], Y[:count], batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0,
        callbacks=list(callbacks), **options,
    ).history  # fmt: skip


def ours():
    return tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=1, strict=True)


def assert_same_weights(one, two):
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_same_training(build=functional, callback=None, **options):
    callback = callback or ours()
    stock, rewritten = compiled(build), compiled(build)
    assert fit(stock, **options) == fit(rewritten, callback, **options)
    assert_same_weights(stock, rewritten)
    assert_ordered(callback.report)
    return callback.report


def test_validation_data():
    """The histories are equal, ``val_loss`` included."""
    assert_same_training(validation_data=(X[:10], Y[:10]))


def test_validation_split_and_class_weight():
    assert_same_training(validation_split=0.25, class_weight={0: 1.0, 1: 2.0, 2: 0.5})


@pytest.fixture(scope="module")
def stock_of_43_examples():
    model = compiled()
    return fit(model, count=43), model


@pytest.mark.parametrize("schedule", ["auto", "fast_forward"])
def test_last_batch_is_smaller(schedule, stock_of_43_examples):
    """43 examples, batches of 8: Keras leaves the batch open, one trace serves both sizes."""
    callback = tf_ooo.OOOBackprop(schedule=schedule, profile_steps=1, strict=True)
    rewritten = compiled()
    history, stock = stock_of_43_examples
    assert fit(rewritten, callback, count=43) == history
    assert_same_weights(stock, rewritten)
    assert callback.report.moved_ops > 0
    assert callback.report.added_edges > 0


def test_unbuilt_model():
    assert_same_training(Net)


@tf.function(jit_compile=True)
def compiled_tanh(x):
    return tf.tanh(x)


class WithCompiledPart(Net):
    """A call that stays a call: TensorFlow gives the plug-in a stub of the function."""

    def call(self, x):
        return self.second(compiled_tanh(self.first(x)))


def test_a_compiled_part_of_a_model_is_no_obstacle():
    assert_same_training(WithCompiledPart)


def test_without_trainable_weights_trains_on_with_one_warning(caplog):
    model, stock = (
        compiled(lambda: functional(trainable=False)),
        compiled(lambda: functional(trainable=False)),
    )
    callback = tf_ooo.OOOBackprop()
    with caplog.at_level(logging.WARNING, logger="tf_ooo"):
        assert fit(model, callback) == fit(stock)
    ours_said = [record.message for record in caplog.records if record.name == "tf_ooo"]
    assert len(ours_said) == 1
    assert "no trainable weights" in ours_said[0]
    assert "no trainable weights" in callback.report.fallback_reason


def test_without_trainable_weights_strict_raises():
    with pytest.raises(tf_ooo.GraphError, match="no trainable weights"):
        fit(compiled(lambda: functional(trainable=False)), ours())


def test_timeline_logger(tmp_path):
    callback = ours()
    fit(compiled(), callback, TimelineLogger(callback, tmp_path, every_epoch=True))
    names = {path.name for path in tmp_path.iterdir()}
    written = {"report.html", "trace.json"}
    of_epochs = {f"epoch_{n:03d}_{name}" for n in (1, 2) for name in written}
    assert names == written | of_epochs | {"plotly.min.js"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"dO:1", "dW:1", "dW:0"}
    with pytest.raises(tf_ooo.OptionsError, match="an OOOBackprop"):
        TimelineLogger("report.html", tmp_path)


def test_timeline_that_cannot_be_written_does_not_stop_training(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    with caplog.at_level(logging.WARNING, logger="tf_ooo"):
        fit(compiled(), tf_ooo.OOOBackprop(timeline=file, profile_steps=1))
    assert "the report was not written" in caplog.text


def test_dump_dir_holds_the_graph_after_each_pass(tmp_path):
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0, dump_dir=tmp_path, strict=True)
    fit(compiled(), callback, epochs=1)
    names = sorted(path.name for path in tmp_path.rglob("*.pbtxt"))
    assert names == [
        "00_input.pbtxt",
        "01_separate.pbtxt",
        "02_annotate.pbtxt",
        "03_order.pbtxt",
        "04_verify.pbtxt",
    ]
    assert "_ooo_kind" in next(tmp_path.rglob("*_verify.pbtxt")).read_text()


def test_enabled_leaves_a_function_without_gradients_alone():
    square = tf.function(lambda x: x * x + 1.0)
    weight = tf.Variable(2.0)
    scaled = tf.function(lambda x: weight * x)
    with tf_ooo.enabled(tf_ooo.Options(strict=True)) as report:
        assert square(tf.constant(3.0)).numpy() == 10.0
        assert scaled(tf.constant(3.0)).numpy() == 6.0
    assert report.rewritten_graph is None
    assert not report.fell_back


class StopAfter(keras.callbacks.Callback):
    """An interruption in the middle of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations.numpy() == 9:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole():
    """Three epochs without a break."""
    model = compiled()
    fit(model, epochs=3)
    return model


@pytest.mark.parametrize("where", ["first", "both"])
def test_backup_and_restore_resumes(where, tmp_path, whole):
    """Interrupted and resumed: the weights of three epochs without a break."""
    interrupted = ours()
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(), interrupted, keras.callbacks.BackupAndRestore(tmp_path), StopAfter(), epochs=3)
    assert_ordered(interrupted.report)
    resumed = compiled()
    again = [ours()] if where == "both" else []
    history = fit(resumed, *again, keras.callbacks.BackupAndRestore(tmp_path), epochs=3)
    assert len(history["loss"]) == 2
    assert_same_weights(whole, resumed)
    for callback in again:
        assert_ordered(callback.report)


class Scaled(Net):
    """Reads a number in Python."""

    factor = 1.0

    def call(self, x):
        return super().call(x) * self.factor


@pytest.fixture
def may_gain(monkeypatch):
    """Let orders gain, as on a GPU."""
    monkeypatch.setattr(timing, "ORDERS_MAY_GAIN_ON_CPU", True)


@pytest.mark.usefixtures("may_gain")
class TestBeginsLate:
    """A comparison that begins within a fit, as soon as what is left of it pays."""

    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch):
        monkeypatch.setattr(timing, "MOST", 1e6)

    def same_training(self, *callbacks, build=functional):
        stock, model, callback = compiled(build), compiled(build), tf_ooo.OOOBackprop()
        assert fit(stock, *callbacks, epochs=8) == fit(model, callback, *callbacks, epochs=8)
        assert_same_weights(stock, model)
        return callback.report

    def test_the_bits_are_those_of_stock(self):
        report = self.same_training()
        assert report.compared_steps > 2 * 6
        assert report.profiling_overhead_s > 0
        assert report.added_edges > 0
        assert f"{report.compared_steps} steps in turns" in report.summary()

    def test_what_python_has_changed_since_the_first_step_is_in_no_step(self):
        class Change(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.factor = 3.0

        report = self.same_training(Change(), build=Scaled)
        assert "something that it reads in Python has changed" in report.fallback_reason
        assert report.compared_steps == 0

    def test_random_state_of_an_op_is_seen_before_a_second_trace(self, monkeypatch):
        class Noisy(Net):
            def call(self, x):
                return super().call(x + tf.random.normal((6,)))

        traced = []
        monkeypatch.setattr(
            "tf_ooo.fit.controller.StepController._trace_ours", lambda *_: traced.append(1) or ""
        )
        assert "draws random numbers" in self.same_training(build=Noisy).fallback_reason
        assert not traced


def test_on_one_cpu_device_nothing_is_compared_unless_asked():
    """No model of ten had a gain there: ``python -m benchmarks run one_cpu``."""
    callback, asked = tf_ooo.OOOBackprop(), tf_ooo.OOOBackprop(compare=True)
    fit(compiled(), callback, epochs=8)
    report = callback.report
    assert (report.fallback_reason, report.compared_steps) == (timing.ON_CPU, 0)
    assert (report.ops, report.profiling_overhead_s) == ({}, 0.0)
    fit(compiled(), asked, epochs=8)
    assert asked.report.compared_steps > 0


@pytest.mark.usefixtures("may_gain")
def test_a_short_fit_is_not_compared_and_says_why():
    callback = tf_ooo.OOOBackprop()
    fit(compiled(), callback)
    report = callback.report
    assert report.fallback_reason.startswith("12 steps of ")
    assert "too few to pay for a comparison of about" in report.summary()
    assert (report.ops, report.profiling_overhead_s) == ({}, 0.0)


def test_compare_false_keeps_stock():
    callback = tf_ooo.OOOBackprop(compare=False)
    fit(compiled(), callback)
    assert callback.report.fallback_reason == "compare=False"


@pytest.mark.usefixtures("may_gain")
def test_epochs_that_are_left_out_are_not_counted():
    callback = tf_ooo.OOOBackprop()
    fit(compiled(), callback, epochs=5, initial_epoch=3)
    assert callback.report.fallback_reason.startswith("12 steps of ")
