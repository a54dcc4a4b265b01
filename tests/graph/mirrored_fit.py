"""Run by test_mirrored.py in a process of its own: two logical CPUs must be set up first."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_ooo


def train(*callbacks):
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
    x, y = rng.normal(size=(64, 7)).astype("float32"), rng.integers(0, 3, 64)
    model.fit(x, y, batch_size=16, epochs=5, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


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
    }
    print(json.dumps(result, default=str))


main()
