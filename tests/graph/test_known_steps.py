"""Traces with other names than the planned step: planned anew, or refused, never run out of order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.pipeline_fits import Training, assert_equal_bits, pipelined
from tests.graph.pipeline_graphs import assert_in_order
from tests.graph.pipeline_models import EVEN, UNEVEN
from tests.zoo import keras, needs_keras_3
from tf_ooo.errors import BackendError

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(60), needs_keras_3]
ANEW = "a step ran in stock order, and the next ones are planned anew"


class Scoped(keras.layers.Layer):
    """Computes in a name scope of its own, which may change from trace to trace."""

    scopes = ("part",)
    traces = 0

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 16), name="kernel")

    def call(self, x):
        scope = self.scopes[min(self.traces, len(self.scopes) - 1)]
        Scoped.traces += 1
        with tf.name_scope(scope):
            return tf.nn.gelu(tf.matmul(x, self.kernel))


def deep():
    """Updates, and the ops of each layer, are few beside all others."""
    hidden = [keras.layers.Dense(16, activation="gelu") for _ in range(7)]
    return keras.Sequential([keras.Input((7,)), *hidden, Scoped(), keras.layers.Dense(3)])


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))


def unchecked(**options):
    return pipelined("1f1b", **{"check_loss": False, "compare": False, "microbatches": 8, **options})


def kinds(report):
    return Counter(node.attr["_ooo_kind"].s.decode() for node in report.rewritten_graph.node)


@pytest.mark.parametrize("make", [lambda: keras.optimizers.SGD(0.05), scaled], ids=["sgd", "scaled"])
def test_updates_with_other_names_are_planned_anew(make):
    """A second optimizer has other names, where a plan is handed from fit to fit."""
    training = Training(deep, make, EVEN, epochs=2)
    before = training.piped(unchecked())
    optimizer = training.model.optimizer
    getattr(optimizer, "inner_optimizer", optimizer).name = "renamed"
    after = training.piped(unchecked())
    assert kinds(after.report) == kinds(before.report)
    assert after.report.added_edges == before.report.added_edges
    assert_in_order(after.report, 2, weights_everywhere=False)
    assert_equal_bits(before.weights, after.weights)
    (note,) = [note for note in after.report.notes if note.startswith(ANEW)]
    assert "/kernel is updated by " in note or "/bias is updated by " in note
    assert "renamed" in note
    again = training.piped(unchecked())
    assert not any(note.startswith(ANEW) for note in again.report.notes)


def test_a_layer_with_other_names_is_planned_anew(monkeypatch):
    training = Training(deep, lambda: keras.optimizers.SGD(0.05), EVEN, epochs=2)
    before = training.piped(unchecked())
    monkeypatch.setattr(Scoped, "scopes", ("renamed",))
    after = training.piped(unchecked())
    assert kinds(after.report) == kinds(before.report)
    assert_equal_bits(before.weights, after.weights)
    assert any(note.startswith(ANEW) and "part" in note for note in after.report.notes)


def test_a_step_that_is_another_whenever_it_is_traced_is_refused(monkeypatch):
    """16 rows, and 4 at the end of each epoch: planned anew once, then it is an error that says why."""
    training = Training(deep, lambda: keras.optimizers.SGD(0.05), UNEVEN, epochs=2)
    training.model  # noqa: B018 - its first call is no trace of the step
    monkeypatch.setattr(Scoped, "scopes", [f"part_{number}" for number in range(1000)])
    monkeypatch.setattr(Scoped, "traces", 0)
    with pytest.raises(BackendError, match="not the step that was planned.*the same each time it is traced"):
        training.piped(unchecked(microbatches=4))


class Waiting(keras.Model):
    """Logs a copy of its loss that waits for the last gradient."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        with tf.control_dependencies([grad.op for grad in grads]):
            return {"loss": loss, "late": tf.nn.softplus(loss)}


def waiting():
    inputs = x = keras.Input((7,))
    for _ in range(4):
        x = keras.layers.Dense(16, activation="gelu")(x)
    return Waiting(inputs, keras.layers.Dense(3)(x))


def test_logs_that_wait_for_gradients_are_in_no_forward_task():
    """With them F of the last layer would wait for dW of the first one."""
    data = EVEN[0], np.ones((48, 3), "float32")
    training = Training(waiting, lambda: keras.optimizers.SGD(0.05), data, loss="mse", metrics=None)
    fitted = training.piped(unchecked(microbatches=4))
    assert not any("wait for each other" in note for note in fitted.report.notes)
    assert_in_order(fitted.report, 2, weights_everywhere=False)
    np.testing.assert_allclose(fitted.history["loss"], training.stock.history["loss"], rtol=1e-5)
