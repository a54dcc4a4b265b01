"""The life of a fit with a mode that does nothing but say what it was asked."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_ooo import SingleDevice
from tf_ooo.errors import BackendError, GraphError
from tf_ooo.fit import timing
from tf_ooo.fit.life import FitLife
from tf_ooo.hosts.ranks.base import SingleEngine
from tf_ooo.report.report import Report

X, Y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


class Mode:
    """Trains in stock order."""

    compiles = False
    without_steps = None  # an epoch
    predicts = None  # in the place of Keras' function

    def __init__(self, said=None, keeps_stock=False, refuses=None, lost=(), **options):
        self.said = [] if said is None else said
        self.keeps_stock, self.refuses, self.lost = keeps_stock, refuses, lost
        self.options, self.report = SingleDevice(**options), Report()

    def join(self):
        return SingleEngine()

    def check(self, model, steps):
        self.said.append("check")
        if self.refuses is not None:
            raise self.refuses

    def prepare(self, model, steps):
        self.said.append("prepare")
        return Training(self, model.train_function)

    def describe(self):
        return self.report


class Training:
    def __init__(self, mode, stock):
        self.mode, self.stock = mode, stock

    def run(self, iterator):
        self.mode.said.append("run")
        return self.stock(iterator)

    def explain(self, error):
        return BackendError(f"explained: {error}")

    def epoch_logs(self, epoch, logs):
        self.mode.said.append("epoch_logs")
        logs["seen first"] = epoch
        return epoch != self.mode.without_steps

    def settle(self, saving):
        self.mode.said.append("settle to save" if saving else "settle")

    def evaluating(self, kind, function):
        return (kind == "predict" and self.mode.predicts) or function

    def watched(self):
        """No plan runs."""

    def __getattr__(self, name):
        if name not in ("replaced", "epoch_begin", "test_begin", "epoch_end", "ended", "restore"):
            raise AttributeError(name)
        return lambda *arguments: self.mode.said.append(name) or list(self.mode.lost)


class OOO(keras.callbacks.Callback):
    """Does what ``OOOBackprop`` does, with a life that is given."""

    def __init__(self, life):
        super().__init__()
        self.life = life

    def on_train_begin(self, logs=None):
        self.life.begin(self.model, self.params)

    def on_epoch_begin(self, epoch, logs=None):
        self.life.epoch_begin(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.life.epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        self.life.finish()


def model_of():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(model, mode, *callbacks, **settings):
    life = FitLife(mode)
    settings = {"batch_size": 4, "epochs": 1, "verbose": 0, **settings}
    model.fit(X, Y, callbacks=[OOO(life), *callbacks], **settings)
    return life


def doing(hook, do):
    return keras.callbacks.LambdaCallback(**{hook: lambda *_, **__: do()})


def raising(hook, error):
    def do():
        raise error

    return doing(hook, do)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_report_of_a_fit_that_is_cut_off_is_written(tmp_path, error):
    mode, model = Mode(timeline=tmp_path), model_of()
    with pytest.raises((KeyboardInterrupt, BackendError)):
        fit(model, mode, raising("on_train_batch_end", error("in a callback")))
    assert (tmp_path / "report.html").exists()
    assert "this fit ended early" in (tmp_path / "report.html").read_text()


def test_logs_are_the_modes_before_any_callback_sees_them():
    """Also one that stands before ours; and of an epoch in which no step ran no callback hears."""
    seen = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["seen first"]))
    mode = Mode()
    mode.without_steps = 1
    model_of().fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[note, OOO(FitLife(mode))])
    assert seen == [0, 2]
    assert mode.said.count("epoch_end") == 2


def test_what_a_mode_is_asked_from_begin_to_end():
    mode, model = Mode(), model_of()
    fit(model, mode, epochs=2)
    epoch = ["epoch_begin", "run", "run", "settle", "epoch_logs", "epoch_end"]
    assert mode.said == ["check", "prepare", *epoch, *epoch, "ended", "restore"]
    assert not vars(model).keys() & {"make_train_function", "make_test_function", "save", "train_on_batch"}


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_end", "on_epoch_end"])
def test_whatever_ends_a_fit_restores_once(hook, error):
    mode, model = Mode(), model_of()
    with pytest.raises((BackendError, KeyboardInterrupt)) as caught:
        fit(model, mode, raising(hook, error))
    assert mode.said.count("restore") == 1
    assert "ended" not in mode.said
    assert "make_train_function" not in vars(model)
    if isinstance(error, Exception):
        assert str(caught.value) == "explained: boom"


def test_saving_and_evaluating_settle_first(tmp_path):
    mode, model = Mode(), model_of()
    fit(model, mode, doing("on_train_batch_end", lambda: model.save_weights(tmp_path / "x.weights.h5")))
    assert mode.said.count("settle to save") == 2
    mode = Mode()
    fit(model, mode, doing("on_train_batch_end", lambda: model.evaluate(X, Y, verbose=0)))
    assert mode.said.count("settle") == 3


def test_what_predicts_is_the_modes_as_long_as_it_has_something():
    mode, model, asked = Mode(), model_of(), []

    def ask():
        asked.append(
            (model.predict(X, verbose=0).shape, len(model.evaluate(X, Y, verbose=0, return_dict=True)))
        )
        mode.predicts = (lambda data: tf.zeros((3, 9))) if len(asked) == 1 else None

    fit(model, mode, doing("on_train_batch_end", ask), epochs=2)
    assert [shape for shape, _ in asked] == [(8, 1), (3, 9), (8, 1), (8, 1)]
    assert not vars(model).keys() & {"make_test_function", "make_predict_function"}
    assert not any(hasattr(function, "guarded") for function in (model.test_function, model.predict_function))


def test_another_train_function_ends_ours_and_is_told_once():
    mode, model = Mode(), model_of()
    fit(model, mode, doing("on_train_batch_end", lambda: model.train_on_batch(X, Y)), epochs=2)
    assert mode.said.count("run") == 1
    assert mode.said.count("restore") == mode.said.count("replaced") == 1
    assert "ended" not in mode.said


def test_what_is_refused_is_raised_unless_the_stock_step_may_train():
    with pytest.raises(GraphError, match="not this one"):
        fit(model_of(), Mode(refuses=GraphError("not this one")))
    with pytest.raises(GraphError, match="not this one"):
        fit(model_of(), Mode(keeps_stock=True, strict=True, refuses=GraphError("not this one")))
    life = fit(model_of(), Mode(keeps_stock=True, refuses=GraphError("not this one")))
    assert life.mode.describe().fell_back
    assert life.mode.describe().fallback_reason == "not this one"


def test_lost_variables_end_a_fit_that_was_through():
    with pytest.raises(BackendError, match="explained: 1 variables, first kernel"):
        fit(model_of(), Mode(lost=["kernel"]))


def test_a_fit_that_was_cut_off_is_ended_by_the_next():
    mode, model = Mode(), model_of()
    life = FitLife(mode)
    model.make_train_function()
    life.begin(model)
    life.begin(model)
    assert mode.said == ["check", "prepare", "restore", "check", "prepare"]
    life.end()
    life.end()
    assert mode.said.count("restore") == 2


def test_the_end_of_a_fit_says_what_takes_long(monkeypatch, tmp_path, capsys):
    def slowly(self):
        time.sleep(0.05)
        return []

    monkeypatch.setattr(timing, "AFTER_S", 0.0)
    monkeypatch.setattr(Training, "restore", slowly, raising=False)
    fit(model_of(), Mode(timeline=tmp_path), verbose=2)
    said = capsys.readouterr().err
    assert "tf_ooo: putting the model back as it was ..." in said
    assert "tf_ooo: writing the report and its pictures ..." in said


def test_a_fit_without_a_verdict_keeps_the_page_of_one_before(tmp_path, monkeypatch):
    from types import SimpleNamespace

    gains = [SimpleNamespace(text="1.20x faster"), None]
    monkeypatch.setattr(Report, "gain", property(lambda report: gains[0]))
    monkeypatch.setattr(
        Report, "headline", property(lambda report: gains[0].text if gains[0] else "undecided")
    )
    written = []
    monkeypatch.setattr(
        "tf_ooo.fit.life.save_timeline", lambda report, folder, prefix: written.append(prefix)
    )
    mode = Mode(timeline=str(tmp_path))
    life = FitLife(mode)
    for _ in range(2):
        life._fits += 1
        life._save_timeline()
        gains[0] = None
    assert written == ["", "fit_2_"]
    assert mode.report.notes == ["an earlier fit with this callback: 1.20x faster"]
