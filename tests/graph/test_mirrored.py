"""MirroredStrategy: one graph holds all replicas, their gradients packed into one communication."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from grappler_passes.graph.training_graph import peak_bytes_by_device
from tests.memory import peak_bytes
from tests.zoo import keras

pytestmark = pytest.mark.devices(2)


def train(*callbacks, rows=64, epochs=5):
    keras.utils.set_random_seed(3)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential(
            [
                keras.Input((7,)),
                keras.layers.Dense(9, activation="relu"),
                keras.layers.Dense(5),
                keras.layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    start = model.get_weights()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 7)).astype("float32"), rng.integers(0, 3, rows)
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks))
    assert not np.array_equal(start[0], model.get_weights()[0])
    return [*model.get_weights(), *(np.asarray(v) for v in model.optimizer.variables)]


def test_two_replicas_are_rewritten_and_keep_their_bits():
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", strict=True)
    stock, ours = train(), train(callback)
    report = callback.report
    assert all(np.array_equal(a, b) for a, b in zip(stock, ours, strict=True))
    assert len(report.layers) == 6  # three a replica
    assert report.added_edges > 0
    assert report.moved_ops > 0
    assert report.ops["comm"] >= 2
    assert report.ops["dO"] > 0


# -- memory limits, in a run in which the batch size is open (60 rows) -------------------------------


def limited(**options):
    """The callback of an epoch with a memory limit."""
    callback = tf_ooo.OOOBackprop(profile_steps=0, **options)
    train(callback, rows=60, epochs=1)
    return callback


@pytest.fixture(scope="module")
def far_away():
    """With a limit that is never reached."""
    return limited(memory_limit_bytes=10**12, batch_size=8)


def test_a_memory_limit_needs_a_batch_size():
    with pytest.raises(tf_ooo.MemoryLimitError, match="batch_size="):
        limited(memory_limit_bytes=10**12)


def test_peaks_are_predicted_for_each_device(far_away):
    result = far_away._life.mode.controller.session.result
    each = peak_bytes_by_device(result.training_graph, result.orders.planned)
    assert sorted(device[-5:] for device in each) == ["CPU:0", "CPU:1"]
    together = peak_bytes(result.training_graph, result.orders.planned)
    assert far_away.report.predicted_peak_bytes == max(each.values()) < together


def test_the_memory_limit_holds_for_each_device(far_away):
    largest = far_away.report.predicted_peak_bytes
    assert limited(memory_limit_bytes=largest, batch_size=8).report.predicted_peak_bytes <= largest
    with pytest.raises(tf_ooo.MemoryLimitError, match="at least"):
        limited(memory_limit_bytes=largest // 2, batch_size=8)
