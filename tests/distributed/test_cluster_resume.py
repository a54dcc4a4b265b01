"""A fit over worker processes that goes on in another process."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest

import tf_ooo
from tests import forked
from tests.distributed.cluster_models import (
    BATCHES,
    MICROBATCHES,
    calls_within_step,
    devices_of,
    perceptron,
    pipeline,
    train,
)
from tests.distributed.clusters import addresses, raises_lost, workers
from tests.same_bits import bits_of
from tf_ooo.costs.table import CostTable

pytestmark = pytest.mark.takes(30)


# -- after a worker was lost --------------------------------------------------------------------------


def train_three_epochs(cluster, folder, first_epoch=0, kills=None):
    """From a checkpoint of ``first_epoch``, if it is not 0; a worker is killed in a step of the second epoch.

    Returns a check sum of the end, the devices and the number of steps.
    """

    def kill():
        if kills is not None:
            os.kill(kills, signal.SIGKILL)

    loss, steps = calls_within_step(BATCHES + 1, MICROBATCHES, kill)
    objects = {loss.__name__: loss}
    file = folder / f"model_{first_epoch}.keras"
    model = keras.models.load_model(file, custom_objects=objects) if first_epoch else perceptron(loss)
    callback, saving = pipeline(cluster), keras.callbacks.ModelCheckpoint(folder / "model_{epoch}.keras")
    train(model, [callback, saving, steps], epochs=3, initial_epoch=first_epoch)
    assert callback.report.added_edges > 0
    assert callback.report.moved_ops > 0
    return bits_of(model), devices_of(callback), int(model.optimizer.iterations)


def test_killed_worker_then_resume_to_the_same_bits(tmp_path):
    """Three epochs in one go; and with a worker killed in a step of the second, from a checkpoint."""
    whole, broken, cluster = tmp_path / "whole", tmp_path / "broken", addresses(2)
    whole.mkdir(), broken.mkdir()
    with workers(cluster, [1]) as started:
        expected = forked.result_of(train_three_epochs, cluster, whole)
        with raises_lost(cluster):
            forked.result_of(train_three_epochs, cluster, broken, 0, started[1].pid)
    assert [path.name for path in broken.iterdir()] == ["model_1.keras"]
    with workers(cluster, [1]):
        resumed = forked.result_of(train_three_epochs, cluster, broken, 1)
    assert resumed == expected
    _, devices, steps = expected
    assert len(set(devices)) == 2
    assert steps == 3 * BATCHES


# -- with late gradients ------------------------------------------------------------------------------


def shortcut():
    """A block with a shortcut, whose convolutions graph optimizers order otherwise than the trace."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12, 12, 2))
    y = keras.layers.Conv2D(4, 2, strides=2, use_bias=False)(inputs)
    y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
    y = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(y)
    y = keras.layers.BatchNormalization()(y)
    x = keras.layers.Conv2D(4, 2, strides=2, use_bias=False)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.ReLU()(keras.layers.Concatenate()([x, y]))  # a sum would make one layer of the two
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False)
    return model


def train_late(cluster, model, callbacks=(), initial_epoch=0, **options):
    """Two epochs; returns the weights and the report."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(64, 12, 12, 2)).astype("float32"), random.integers(0, 2, 64)
    ours = tf_ooo.OOOBackprop(mode="layerpipe", devices=cluster, schedule="layerpipe", **options)
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": 2, "initial_epoch": initial_epoch}
    model.fit(x, y, callbacks=[ours, *callbacks], **settings)
    # Gradients are late because tensors wait in registers for a later round.
    assert ours.report.layerpipe["registers"] > 0
    assert max(ours.report.layerpipe["delay_steps"].values()) > 0
    return model.get_weights(), ours.report


def measure_and_train(cluster, folder):
    saving = keras.callbacks.ModelCheckpoint(folder / "model_{epoch}.keras")
    weights, report = train_late(cluster, shortcut(), [saving], profile_steps=1)
    report.costs.save(folder / "costs.json")
    return weights, report.planned.to_text(), report.costs.link.latency_s


def go_on_with_its_costs(cluster, folder):
    model, costs = keras.models.load_model(folder / "model_1.keras"), CostTable.load(folder / "costs.json")
    weights, report = train_late(cluster, model, initial_epoch=1, costs=costs)
    return weights, report.planned.to_text(), report.costs.link.latency_s


def test_late_gradients_go_on_in_another_process(tmp_path):
    """With the costs that were measured, and the link: the same plan, and the same weights in the end."""
    cluster = addresses(2)
    with workers(cluster, [0, 1]):
        weights, plan, link_s = forked.result_of(measure_and_train, cluster, tmp_path)
    with workers(cluster, [0, 1]):
        resumed, plan_again, link_again_s = forked.result_of(go_on_with_its_costs, cluster, tmp_path)
    assert plan_again == plan
    assert link_again_s == link_s > 0
    for a, b in zip(resumed, weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
