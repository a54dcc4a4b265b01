"""One device beside a fit over two: measured, undone, and said where it is faster."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import assert_equal_bits
from tests.zoo import keras
from tf_ooo.fit import timing
from tf_ooo.fit.timing import FEW, ONE_DEVICE, STEPS
from tf_ooo.hosts.system_memory import ReportedLimit
from tf_ooo.modes.pipeline import plans

pytestmark = pytest.mark.devices(2)

X = np.random.default_rng(1).normal(size=(64, 7)).astype("float32")
Y = np.random.default_rng(2).integers(0, 3, 64)
MODES = {
    "pipeline": lambda **options: tf_ooo.Pipeline(devices=2, microbatches=2, schedule="gpipe", **options),
    "layerpipe": lambda **options: tf_ooo.LayerPipe(devices=2, **options),
}


class Noise(keras.layers.Layer):
    """Draws from a state that the op keeps."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def network(*more):
    """With all that a step changes: seeds, moving statistics, momenta, metrics."""
    keras.utils.set_random_seed(4)
    layers = keras.layers
    parts = [layers.Dense(9, "relu"), layers.BatchNormalization(), layers.Dropout(0.3), *more]
    model = keras.Sequential([keras.Input((7,)), *parts, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def fit(model, mode, epochs=2, **options):
    callback = tf_ooo.OOOBackprop(MODES[mode](**{"profile_steps": 1, **options}))
    history = model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=[callback])
    return callback, history.history


@pytest.mark.parametrize("mode", MODES)
def test_a_fit_that_is_compared_trains_to_the_same_bits(mode):
    model, without = network(), network()
    # Measured once, or two plans could differ.
    costs = fit(network(), mode, compare=False)[0].report.costs
    compared, history = fit(model, mode, compare=True, costs=costs)
    assert len(compared.report.baselines_s[ONE_DEVICE]) >= STEPS
    _, history_without = fit(without, mode, compare=False, costs=costs)
    assert_equal_bits(model.get_weights(), without.get_weights())
    assert history == history_without


@pytest.mark.parametrize("mode", MODES)
def test_the_report_says_what_was_gained(mode):
    report = fit(network(), mode, compare=True)[0].report
    steps = len(report.baselines_s[ONE_DEVICE])
    assert STEPS <= steps <= 30
    assert report.no_baseline == ""
    assert report.gain.ours_s == report.steps_s
    assert f"{steps} + {len(report.steps_s)} steps" in report.headline
    rows = dict(report.rows())
    assert rows["gain"] == report.headline
    assert re.search(r"; measured [\d.]+ m?s: the prediction is \d+% too (high|low)$", rows["predicted"])
    assert report.profiling_overhead_s > 0
    assert ", not in turns, " in report.headline
    assert re.search(r"link \d+%, .*the largest layer, .+, \d+% of the step", rows["limited by"])


@pytest.mark.parametrize("mode", MODES)
def test_why_there_is_nothing_to_compare_with(mode, monkeypatch):
    never = fit(network(), mode, compare=False)[0].report
    assert never.no_baseline == "compare=False"
    if mode == "pipeline":  # the other refuses such a layer
        random = fit(network(Noise()), mode, compare=True)[0].report
        assert "draws random numbers from a state of its own" in random.no_baseline
        monkeypatch.setattr(plans, "available_bytes", lambda: ReportedLimit(1, "free"))
        short = fit(network(), mode)[0].report
        assert "the fit is too short to measure one device" in short.headline
        assert "compare=True" in short.headline


@pytest.mark.parametrize("mode", MODES)
def test_a_short_fit_is_compared_with_a_few_steps_of_stock(mode):
    """The verdict is over what the user had before; the same micro-batches on one device stand below."""
    report = fit(network(), mode, profile_steps=3)[0].report
    assert len(report.baselines_s[ONE_DEVICE]) >= FEW
    assert report.gain.baseline == ONE_DEVICE
    assert report.headline == report.gain.text
    rows = dict(report.rows())
    below = " a step with the same micro-batches (2 at the start)"
    assert rows.get("one device", "").endswith(below) == (mode == "pipeline")


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_calls_python_is_called_for_the_fit_alone(mode):
    """Nobody could undo what Python does in steps beside the fit."""
    seen = []

    def loss(y, predicted):
        tf.py_function(lambda number: seen.append(float(number)), [tf.reduce_mean(predicted)], [])
        return keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)

    model = network()
    model.compile("sgd", loss)
    report = fit(model, mode, costs=fit(network(), mode, compare=False)[0].report.costs)[0].report
    assert "calls Python, and what that does in steps beside the fit cannot be undone" in report.no_baseline
    assert ONE_DEVICE not in report.baselines_s
    if mode == "pipeline":  # where one device may train a fit of unknown length is compared in any case
        callback = tf_ooo.OOOBackprop(MODES[mode](profile_steps=1, fall_back=True))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).filter(lambda x, y: True)
        model.fit(data, epochs=2, verbose=0, callbacks=[callback])
        assert "calls Python" in callback.report.no_baseline


def test_a_long_fit_is_compared_by_itself():
    """5% of what is left pay for it; the length is said, not trained."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    callback = tf_ooo.OOOBackprop(MODES["pipeline"](profile_steps=1))
    network().fit(X, Y, batch_size=16, epochs=10**6, verbose=0, callbacks=[callback, Stop()])
    assert callback.report.gain is not None


@pytest.mark.parametrize("mode", MODES)
def test_one_warning_where_one_device_is_faster(caplog, mode):
    callback, _ = fit(network(), mode, compare=True)
    trained, report = callback._life.mode.distributed, callback.report
    report.notes.clear()
    trained.slower_warning.advise = trained.slower_warning.advise or (
        lambda gain: f"{gain.text}; there is something better"
    )
    report.change(baselines_s={ONE_DEVICE: [1e-9] * STEPS})
    caplog.clear()
    caplog.set_level(logging.WARNING, "tf_ooo")
    trained.say_if_slower()
    trained.say_if_slower()
    (note,) = report.notes
    assert note.startswith("slower than one device; ")
    (warning,) = [record.message for record in caplog.records]
    assert warning == f"{report.gain.text}; {note.partition('; ')[2]}"


@pytest.mark.parametrize("mode", MODES)
def test_the_first_steps_stand_in_where_nothing_is_compared(caplog, mode):
    callback = tf_ooo.OOOBackprop(MODES[mode](profile_steps=3, compare=False))
    network().fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=[callback])
    report = callback.report
    assert len(report.first_steps_s) == 2
    assert report.gain is None
    rows = dict(report.rows())
    same = " with the same micro-batches" if mode == "pipeline" else ""
    assert re.fullmatch(rf"[\d.]+ m?s a step{same} \(2 at the start\)", rows["one device"])
    report.change(first_steps_s=[1e-9] * STEPS)
    caplog.clear()
    caplog.set_level(logging.WARNING, "tf_ooo")
    trained = callback._life.mode.distributed
    trained.slower_warning.advise = lambda gain: gain.text  # the fit itself may have said it
    trained.say_if_slower()
    assert caplog.records[0].message.startswith(f"slower than one device{same}: ")


@pytest.mark.parametrize("mode", MODES)
def test_what_takes_long_at_the_start_is_said(mode, monkeypatch, capsys):
    monkeypatch.setattr(timing, "AFTER_S", 0.0)
    callback = tf_ooo.OOOBackprop(MODES[mode](profile_steps=1, compare=True))
    network().fit(X, Y, batch_size=16, verbose=2, callbacks=[callback])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" ...")]
    about = {re.sub(r", about [^;]*|; .*", "", line.removesuffix(" ...")): line for line in lines}
    begun = list(about)
    parts, last = {
        "pipeline": (" in 2 micro-batches", "tf_ooo: placing the step on 2 devices"),
        "layerpipe": ("", "tf_ooo: spreading the step over 2 devices"),
    }[mode]
    assert f"tf_ooo: tracing the step{parts}, to cut it" in begun
    assert "tf_ooo: measuring step 1 of 1 on one device" in begun
    assert any(line.startswith("tf_ooo: planning, ") for line in begun)
    assert re.search(
        r"to compare with, about [\d.]+ m?s \.\.\.$", about["tf_ooo: measuring one device, to compare with"]
    )
    if mode == "pipeline":
        assert re.search(r"on each other, about [\d.]+ m?s \.\.\.$", about[begun[0]])
        assert re.search(r"in 2 micro-batches, to cut it, about [\d.]+ m?s ", about[begun[1]])
        assert re.search(
            r"about [\d.]+ m?s; (it pays from about [\d,]+ steps on|no gain over one device is predicted)",
            about[last],
        )
    ends = ["putting the model back as it was", "writing the report and its pictures"]
    assert begun[-2:] == [f"tf_ooo: {what}" for what in ends]
    assert last in begun
