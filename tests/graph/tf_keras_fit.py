"""Run by test_versions.py in a process of its own: a pipeline of a tf_keras model on two logical CPUs.

Prints one JSON object, a check's result by its name.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

import tf_ooo
from tests.scripts import print_found
from tf_ooo.compat import user_keras

keras = user_keras()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(52, 7)).astype("float32"), RNG.integers(0, 3, 52)


def train(*callbacks):
    """8 steps, the last of each epoch with fewer rows."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(33, "relu"), keras.layers.Dense(21, "gelu"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((7,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model, history.history


def pipeline():
    stock, before = train()
    first, out = None, {}
    for schedule in ("gpipe", "zb_h1"):
        callback = tf_ooo.OOOBackprop(mode="pipeline", schedule=schedule, devices=2, microbatches=4)
        model, history = train(callback)
        first = first or model.get_weights()
        pairs = list(zip(model.get_weights(), stock.get_weights(), strict=True))
        graph = callback.report.rewritten_graph
        out[schedule] = {
            "keras": type(model).__module__.partition(".")[0],
            "environment": callback.report.environment,
            "equal": all(np.array_equal(a, b) for a, b in zip(model.get_weights(), first, strict=True)),
            "distance": max(float(np.abs(a - b).max()) for a, b in pairs),
            "loss": float(np.abs(np.subtract(history["loss"], before["loss"])).max()),
            "moved": float(max(np.abs(w).max() for w in model.layers[-1].get_weights()[1:])),
            "devices": sorted({node.device[-5:] for node in graph.node if node.attr["_ooo_kind"].s == b"dW"}),
            "back": sorted({variable.device[-5:] for variable in model.variables}),
        }
    return out


if __name__ == "__main__":
    print_found({"pipeline": pipeline}, sys.argv[1:], 2)
