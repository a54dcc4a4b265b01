"""Real fits whose steps are recorded: what ran, beside the plan; the same bits."""

from __future__ import annotations

import json
import logging

import keras
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.measured_fits import assert_covers, assert_same_weights, fit, model_of, recorded


@pytest.mark.parametrize("together", [1, 4])
def test_one_device(tmp_path, together):
    report = recorded(
        tmp_path,
        lambda **more: tf_ooo.SingleDevice(schedule="fast_forward", **more),
        steps_per_execution=together,
    )
    assert_covers(report)
    kinds = {task.kind for task in report.measured_timeline.schedule.tasks}
    assert kinds == {"F", "dO", "dW", "U"}
    begins = {event.task: event.start_s for event in report.measured_timeline.events}
    first_backward = min(begin_s for task, begin_s in begins.items() if task.kind == "dO")
    assert all(begin_s <= first_backward for task, begin_s in begins.items() if task.kind == "F")
    # They are of one step, also where several are one execution: each op was counted once.
    measured = report.measured_timeline
    # No task is counted twice: on one device no more can be busy than there is of the step.
    assert 0 < sum(measured.busy_s) <= measured.makespan_s
    assert any("measured order" in line for line in report.measured_against_plan)
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len({event["dur"] for event in spans}) > len(report.planned.tasks) / 2, "invented times"
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb")), "TensorBoard's profile tab has nothing"


def test_nothing_is_recorded_without_a_folder():
    callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice(schedule="fast_forward"))
    fit(model_of(), callback)
    assert callback.report.measured_timeline is None


def test_where_stock_is_kept_unasked_it_is_said_how_it_is_recorded(tmp_path):
    """On one CPU device nothing is compared; asked to, stock steps are recorded beside the plan."""
    callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice())
    fit(model_of(), callback)
    assert dict(callback.report.rows())["measured timeline"] == (
        "none: the stock step ran; timeline= records a plan, and with compare=True there is one"
    )
    callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice(timeline=tmp_path))
    fit(model_of(), callback)
    assert callback.report.summary().count("; with compare=True some steps are recorded") == 1


def test_a_fit_that_ends_too_early_says_so(tmp_path):
    callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice(timeline=tmp_path, compare=True))
    fit(model_of(), callback, batches=3)
    assert callback.report.not_measured == "training ended before the plan ran"
    assert "none: training ended" in callback.report.summary()


class Profiling(keras.callbacks.Callback):
    """A user's profile, as TensorBoard's with ``profile_batch``."""

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def on_train_begin(self, logs=None):
        tf.profiler.experimental.start(self.folder)

    def on_train_end(self, logs=None):
        tf.profiler.experimental.stop()


def test_a_profiler_that_runs_already_is_left_alone(tmp_path, caplog):
    callback = tf_ooo.OOOBackprop(tf_ooo.SingleDevice(schedule="fast_forward", timeline=tmp_path / "ours"))
    with caplog.at_level(logging.WARNING, logger="tf_ooo"):
        trained = fit(model_of(), callback, Profiling(tmp_path / "theirs"))
    assert "already running" in callback.report.not_measured
    assert [record.message for record in caplog.records].count(
        f"no timeline is measured: {callback.report.not_measured}"
    ) == 1
    assert callback.report.measured_timeline is None
    assert list((tmp_path / "theirs").rglob("*.xplane.pb")), "the user's profile was ended"
    assert_same_weights(
        trained, fit(model_of(), tf_ooo.OOOBackprop(tf_ooo.SingleDevice(schedule="fast_forward")))
    )


def test_a_fit_without_a_plan_says_so(tmp_path):
    """XLA has no streams on a CPU."""
    report = recorded(tmp_path, tf_ooo.SingleDevice, jit_compile=True)
    assert report.not_measured == "the stock step runs, there is no plan"
