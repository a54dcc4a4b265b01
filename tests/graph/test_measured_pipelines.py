"""Pipelines and LayerPipe: recorded steps on two devices of a process."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tf_ooo
from tests.graph.measured_fits import assert_covers, fit, model_of, recorded

pytestmark = pytest.mark.devices(2)


def lowest_output_grads(report):
    """dO of what needs none: it has no ops."""
    return {task for task in report.planned.tasks if task.kind == "dO" and task.stage == 0}


@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
def test_a_pipeline(tmp_path, schedule):
    report = recorded(tmp_path, lambda **more: tf_ooo.Pipeline(schedule=schedule, microbatches=4, **more))
    assert_covers(report, without=lowest_output_grads(report))
    assert report.measured_timeline.schedule.devices == 2
    assert report.measured_timeline.schedule.microbatches == 4
    assert "a step planned" in " ".join(report.measured_against_plan)
    assert report.scalars()["bubble_measured"] == report.measured_timeline.bubble_fraction
    page = (tmp_path / "report.html").read_text()
    assert "One step, planned and measured" in page
    # A pipeline's stages say where a dO is, and nothing is communicated for a layer alone.
    assert "dO of its own" not in page
    assert "comm ops" not in page
    assert (tmp_path / "plotly.min.js").exists()


def test_a_gradient_that_is_added_up_once(tmp_path):
    """The rows of an Embedding, of all micro-batches, are no task of one of them."""
    rng = np.random.default_rng(0)
    words, classes = rng.integers(0, 50, (320, 7)), rng.integers(0, 3, 320)
    layers = [keras.layers.Embedding(50, 16), keras.layers.Flatten(), keras.layers.Dense(8, "relu")]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *layers, keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    callback = tf_ooo.OOOBackprop(tf_ooo.Pipeline(schedule="1f1b", microbatches=4, timeline=tmp_path))
    model.fit(words, classes, batch_size=16, verbose=0, callbacks=[callback])
    report = callback.report
    added_once = {task for task in report.planned.tasks if task.kind == "dW" and task.stage == 0}
    assert_covers(report, without=lowest_output_grads(report) | added_once)


def test_layerpipe_in_epochs_that_are_short(tmp_path):
    """Rounds run one by one where fewer batches are left than run together."""
    callback = tf_ooo.OOOBackprop(tf_ooo.LayerPipe(profile_steps=0, timeline=tmp_path))
    fit(model_of(), callback, batches=4, epochs=5)
    report = callback.report
    assert report.measured_timeline is not None, report.not_measured
    assert {event.device for event in report.measured_timeline.events} == {0, 1}


def test_layerpipe(tmp_path):
    """A round: each task once, of another batch each.  Where it is cut decides how late gradients are."""
    measuring = tf_ooo.OOOBackprop(tf_ooo.LayerPipe())
    fit(model_of(), measuring, batches=10)
    costs = measuring.report.costs
    report = recorded(tmp_path, lambda **more: tf_ooo.LayerPipe(costs=costs, **more))
    assert "One round, planned and measured" in (tmp_path / "report.html").read_text()
    assert report.measured_timeline is not None, report.not_measured
    planned = {task for task in report.planned.tasks if not task.microbatch and task.kind != "U"}
    measured = set(report.measured_timeline.schedule.tasks)
    assert planned - lowest_output_grads(report) <= measured
    device_of = {task: device for (device, _), tasks in report.planned.lanes.items() for task in tasks}
    assert {event.device for event in report.measured_timeline.events} == {0, 1}
    assert all(event.device == device_of[event.task] for event in report.measured_timeline.events)


def test_recorded_steps_are_not_among_those_that_are_compared(tmp_path):
    """They are slower by the profiler."""
    counts = []
    for more in ({}, {"timeline": tmp_path}):
        callback = tf_ooo.OOOBackprop(tf_ooo.Pipeline(microbatches=2, compare=False, **more))
        fit(model_of(), callback)
        counts.append(len(callback.report.steps_s))
    assert counts[1] == counts[0] - 3
