"""Validation, prediction and saving in a fit over workers: never are all weights in one process again."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import tf_ooo
from tests.distributed.cluster_models import hosts_of, pipeline
from tests.distributed.clusters import addresses, workers
from tf_ooo.rewriting import forward

pytestmark = [pytest.mark.alone, pytest.mark.takes(40)]
ROWS, WIDTH, DEPTH = 16, 1140, 16
X = np.random.default_rng(0).normal(size=(2 * ROWS + 5, WIDTH)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, len(X))


def wide():
    """Weights of 80 MB."""
    keras.utils.set_random_seed(3)
    with tf_ooo.host_memory():
        hidden = (keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(DEPTH))
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3), loss, metrics=["accuracy"], jit_compile=False)
    return model


def resident_bytes(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def growth_bytes(function):
    """Return the result of a function, and how far this process grows meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    result = function()
    return result, resident_bytes("VmHWM") - before


class Evaluating(keras.callbacks.Callback):
    """Notes what the model evaluates and predicts in the fit, and how far this process grows in it."""

    def __init__(self, path):
        super().__init__()
        self._path = path
        self.bytes, self.seen, self.weights, self.places = [], [], [], []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())
        self.places.append(hosts_of(self.model))
        evaluated, evaluating_bytes = growth_bytes(self.evaluated)
        _, saving_bytes = growth_bytes(lambda: self.model.save_weights(self._path))
        self.bytes.append((evaluating_bytes, saving_bytes))
        self.seen.append((evaluated, [logs["val_loss"], logs["val_accuracy"]]))

    def evaluated(self):
        evaluated = self.model.evaluate(X, Y, batch_size=ROWS, verbose=0)
        return evaluated, self.model.predict(X, batch_size=ROWS, verbose=0)


def test_batches_pass_through_the_workers(monkeypatch, tmp_path):
    graphs, rewrite = [], forward.rewrite_forward

    def noting(*arguments):
        placed = rewrite(*arguments)
        graphs.append(placed.graph_def)
        return placed

    monkeypatch.setattr(forward, "rewrite_forward", noting)
    cluster, evaluating = addresses(2), Evaluating(str(tmp_path / "now.weights.h5"))
    with workers(cluster, [0, 1]):
        model = wide()
        callback = pipeline(cluster, costs=None, profile_steps=0, schedule="1f1b")
        settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "epochs": 2}
        model.fit(X, Y, **settings, callbacks=[callback, evaluating], validation_data=(X, Y))
        assert hosts_of(model) == ["localhost"]
        for weights, ((evaluated, predicted), validated) in zip(
            evaluating.weights, evaluating.seen, strict=True
        ):
            model.set_weights(weights)
            stock_evaluated, stock_predicted = evaluating.evaluated()
            assert evaluated == validated == stock_evaluated
            assert predicted.tobytes() == stock_predicted.tobytes()
    assert all("worker" in places for places in evaluating.places)
    whole_bytes = sum(weight.nbytes for weight in model.get_weights())
    assert whole_bytes > 80e6
    evaluating_bytes, saving_bytes = evaluating.bytes[-1]
    assert evaluating_bytes < whole_bytes / 4
    assert saving_bytes < whole_bytes / 2  # of its sixteen large weights those on their way
    assert not any("all weights are sent" in note for note in callback.report.notes)
    assert len(graphs) == 3
    for graph in graphs:
        products = [node for node in graph.node if node.op in ("MatMul", "_FusedMatMul")]
        assert len(products) == DEPTH + 1
        assert {node.device.split("/")[3] for node in products} == {"task:0", "task:1"}
        assert {node.device.split("/")[1] for node in products} == {"job:worker"}
