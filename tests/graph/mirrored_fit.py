"""Run by test_mirrored.py in a process of its own: two logical CPUs must be set up first."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from grappler_passes.liveness import peak_bytes, peak_bytes_by_device


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
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 7)).astype("float32"), rng.integers(0, 3, rows)
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def limited(**options):
    """What a run in which the batch size is open (60 rows) says to a memory limit."""
    callback = tf_ooo.OOOBackprop(profile_steps=0, **options)
    try:
        train(callback, rows=60, epochs=1)
    except tf_ooo.MemoryLimitError as error:
        return str(error)
    result = callback._session.controller.session.result
    each = peak_bytes_by_device(result.training_graph, result.execution_order)
    together = peak_bytes(result.training_graph, result.execution_order)
    return {"each": each, "together": together, "predicted": callback.report.predicted_peak_bytes}


def main() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", strict=True)
    stock, ours = train(), train(callback)
    report = callback.report
    result = {
        "equal": all(np.array_equal(a, b) for a, b in zip(stock, ours, strict=True)),
        "ops": report.ops,
        "added_edges": report.added_edges,
        "layers": report.layers,
        "no batch size": limited(memory_limit_bytes=10**12),
        "limited": limited(memory_limit_bytes=10**12, batch_size=8),
    }
    largest = result["limited"]["predicted"]
    result["exactly"] = limited(memory_limit_bytes=largest, batch_size=8)
    result["too low"] = limited(memory_limit_bytes=largest // 2, batch_size=8)
    print(json.dumps(result, default=str))


main()
