"""Run by test_pipeline.py in a process of its own: logical CPUs must be set up first.

Arguments: the number of devices, then names of checks.  Prints one JSON object, a check's result by its name.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_ooo

DEVICES = int(sys.argv[1])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(52, 7)).astype("float32"), RNG.integers(0, 3, 52)


def mlp():
    layers = [
        keras.layers.Dense(33, activation="relu"),
        keras.layers.Dense(21, activation="gelu"),
        keras.layers.Dense(17),
        keras.layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((7,)), *layers])


def train(make, optimizer, *callbacks, data=(X, Y), epochs=5, batch_size=16, **compiled):
    keras.utils.set_random_seed(3)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"metrics": ["accuracy"], "jit_compile": False, **compiled}
    model.compile(optimizer(), compiled.pop("loss", loss), **compiled)
    history = model.fit(
        *data, batch_size=batch_size, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    return model, history.history


def pipelined(schedule, **options):
    options = {"devices": DEVICES, "microbatches": 4, **options}
    return tf_ooo.OOOBackprop(mode="pipeline", schedule=schedule, **options)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.get_weights(), b.get_weights(), strict=True))


def distance(a, b):
    pairs = zip(a.get_weights(), b.get_weights(), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


def where_ops_are(report):
    """Kinds of ops by device."""
    found = {}
    for node in report.rewritten_graph.node:
        kind = node.attr["_ooo_kind"].s.decode()
        found.setdefault(node.device[-5:], set()).add(kind)
    return {device: sorted(kinds - {""}) for device, kinds in found.items()}


def check_schedules():
    """5 epochs of 4 steps, the last one uneven: bits of all schedules; against the unsplit batch."""
    stock, before = train(mlp, lambda: keras.optimizers.Adam(0.01))
    first, out = None, {}
    for schedule in ("gpipe", "zb_h1"):
        callback = pipelined(schedule)
        model, history = train(mlp, lambda: keras.optimizers.Adam(0.01), callback)
        first = first or model
        out[schedule] = {
            "equal": same(first, model),
            "distance": distance(stock, model),
            "loss": float(np.abs(np.subtract(history["loss"], before["loss"])).max()),
            "accuracy": history["accuracy"] == before["accuracy"],
            "ops": where_ops_are(callback.report),
            "back": sorted({v.value.device[-5:] for v in model.variables}),
            "edges": callback.report.added_edges,
        }
    return out


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    configuration = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, configuration)
    print(json.dumps({name: globals()[f"check_{name}"]() for name in sys.argv[2:]}, default=str))


main()
