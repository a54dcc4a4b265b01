"""OOOBackprop in ``model.fit``: the same bits, and training that never breaks."""

from __future__ import annotations

import copy
import functools
import pickle

import keras
import numpy as np
import pytest

import tf_ooo
from keras_callbacks import GainLogger
from tests import zoo
from tf_ooo.fit import timing
from tf_ooo.modes.single_device.fit import REPLACED

RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, 8, 8, 1)).astype("float32")
Y = RNG.integers(0, 10, 160)


def build(**compile_options):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.BatchNormalization(),
         layers.Flatten(), layers.Dense(10)]
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **{"jit_compile": False, **compile_options})
    if zoo.KERAS_3:
        zoo.make_variables(model, X, Y)
    return model


def fit(model, *callbacks, **options):
    return model.fit(
        X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks), **options
    )


@functools.cache
def stock_fit(**compile_options):
    """(losses, weights) of the stock order."""
    model = build(**compile_options)
    return fit(model).history["loss"], model.get_weights()


def assert_same(callback, **compile_options):
    losses, weights = stock_fit(**compile_options)
    ours = build(**compile_options)
    assert fit(ours, callback).history["loss"] == losses
    for a, b in zip(weights, ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    return ours


@pytest.mark.parametrize("schedule", ["auto", "in_order", "fast_forward"])
def test_bit_equal_after_20_steps(schedule, tmp_path):
    callback = tf_ooo.OOOBackprop(schedule=schedule, timeline=tmp_path, strict=True)
    model = assert_same(callback)
    assert callback.report.moved_ops > 0
    assert callback.report.added_edges > 0
    # Auto may need up to 40 steps to be sure; what these took is known.
    assert callback.report.undecided in ("", "20 of at most 40 steps compared")
    assert callback.report.measured_step_s > 0
    assert (tmp_path / "report.html").exists()
    assert "make_train_function" not in vars(model)


@pytest.mark.parametrize(
    ("option", "error"),
    # XLA on this platform has no streams to put weight gradients on.
    [({"run_eagerly": True}, tf_ooo.GraphError), ({"jit_compile": True}, tf_ooo.BackendError)],
)
def test_not_rewritable_trains_on_and_says_why(option, error):
    callback = tf_ooo.OOOBackprop()
    fit(build(**option), callback)
    assert next(iter(option)) in callback.report.fallback_reason
    with pytest.raises(error):
        fit(build(**option), tf_ooo.OOOBackprop(strict=True))


def test_steps_per_execution():
    callback = tf_ooo.OOOBackprop(compare=True)
    assert_same(callback, steps_per_execution=2)
    assert callback.report.moved_ops > 0
    assert callback.report.added_edges > 0


def test_epochs_of_two_executions_are_compared_with_their_like():
    """The second execution of an epoch is shorter: each order runs on both kinds."""
    callback = tf_ooo.OOOBackprop(compare=True)
    model = build(steps_per_execution=6)
    model.fit(X, Y, batch_size=16, epochs=8, shuffle=False, verbose=0, callbacks=[callback])
    runs = callback._life.mode.controller.comparison.times._rounds[0]._runs
    assert [samples for _, samples in runs] == [96.0, 64.0]
    assert [sorted(turns) for turns in runs.values()] == [["rewritten", "stock"]] * 2


def test_training_on_a_batch_in_between_is_noted():
    class Between(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.train_on_batch(X[:16], Y[:16])

    callbacks = [tf_ooo.OOOBackprop(profile_steps=0, schedule="in_order")]
    model = build()
    fit(model, *callbacks)
    assert REPLACED not in callbacks[0].report.notes
    fit(model, *callbacks, Between())
    assert callbacks[0].report.notes.count(REPLACED) == 1


def test_train_function_is_back_when_training_raises():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("stop")

    model = build()
    callback = tf_ooo.OOOBackprop(compare=True)
    with pytest.raises(RuntimeError, match="stop"):
        fit(model, callback, Stop())
    fit(model)
    assert model.train_function is not callback._life.mode.controller


def test_failing_pass_trains_on_and_is_logged_once(monkeypatch, caplog):
    def broken(self, graph_def, training_graph):
        raise ValueError("broken pass")

    monkeypatch.setattr("grappler_passes.passes.rewrite_plan.OrderPass.run", broken)
    callback = tf_ooo.OOOBackprop(compare=True)
    assert_same(callback)
    assert "broken pass" in callback.report.fallback_reason
    said = [
        record for record in caplog.records if record.name == "tf_ooo" and "broken pass" in record.message
    ]
    assert len(said) == 1
    with pytest.raises(tf_ooo.OOOError, match="broken pass"):
        fit(build(), tf_ooo.OOOBackprop(strict=True))


def test_memory_limit_is_refused():
    with pytest.raises(tf_ooo.MemoryLimitError, match="at least|are not known"):
        fit(build(), tf_ooo.OOOBackprop(memory_limit_bytes=1))


def test_fit_again_and_recompiled():
    stock, ours, callback = build(), build(), tf_ooo.OOOBackprop(schedule="fast_forward", strict=True)
    for model, callbacks in ((stock, ()), (ours, (callback,))):
        fit(model, *callbacks)
        fit(model, *callbacks)
        model.layers[0].trainable = False
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
        fit(model, *callbacks)
    for a, b in zip(stock.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert callback.report.moved_ops > 0


def test_backup_and_checkpoint(tmp_path):
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    model = build()
    fit(model, tf_ooo.OOOBackprop(strict=True), backup, checkpoint)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda callback: pickle.loads(pickle.dumps(callback))]
)
def test_a_copy_of_a_used_callback_has_its_options_and_trains(again):
    """KerasTuner copies callbacks like this for each trial."""
    model, x, y = zoo.compiled(zoo.mlp)
    used = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0, strict=True)
    model.fit(x, y, verbose=0, callbacks=[used])
    fresh = again(used)
    assert fresh._life.mode.options == used._life.mode.options
    assert fresh.report.moved_ops == 0
    model.fit(x, y, verbose=0, callbacks=[fresh])
    assert fresh.report.moved_ops == used.report.moved_ops > 0


def test_the_step_time_is_known_where_nothing_is_compared(monkeypatch):
    """On one CPU stock runs; its first steps are timed, and no verdict comes of them."""
    monkeypatch.setattr(timing, "ORDERS_MAY_GAIN_ON_CPU", False)
    ours = tf_ooo.OOOBackprop()
    history = (
        build().fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[ours, GainLogger(ours)]).history
    )
    report = ours.report
    assert history["ooo_step_s"][-1] == report.stock_step_s > 0
    assert len(report.steps_s) == 3
    assert report.gain is None
    assert report.headline.startswith("no gain: the stock step runs: on one CPU device")
    assert "step, stock" in dict(report.rows())


def test_gain_logger(tmp_path):
    """In the history, and in what a callback that is listed after it writes."""
    ours = tf_ooo.OOOBackprop(compare=True)
    written = tmp_path / "log.csv"
    model = build()
    callbacks = [ours, GainLogger(ours), keras.callbacks.CSVLogger(written)]
    history = model.fit(X, Y, batch_size=16, epochs=30, verbose=0, callbacks=callbacks).history
    assert history["ooo_step_s"][-1] > 0
    assert history["ooo_speed_up"][-1] == (1.0 if ours.report.fell_back else ours.report.gain.ratio)
    bubbles = {"ooo_bubble_planned", "ooo_bubble_measured"}
    assert np.isnan(history["ooo_bubble_measured"]).all()  # there is no timeline=
    # Planned is what the page shows: one device does one task after the other.
    planned = history["ooo_bubble_planned"][-1]
    assert np.isnan(planned) if ours.report.timeline is None else planned == pytest.approx(0.0)
    assert {"ooo_step_s", "ooo_speed_up", *bubbles} < set(written.read_text().splitlines()[0].split(","))
    with pytest.raises(tf_ooo.OptionsError, match="an OOOBackprop"):
        GainLogger("report.html")
