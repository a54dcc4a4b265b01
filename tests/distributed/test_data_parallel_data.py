"""Data of other lengths and kinds; what depends on the engine is in test_data_parallel_engines.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed import training as t

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("per_execution", [1, 3])
def test_ranks_with_fewer_batches(engine, quick_plans, per_execution):
    """80 rows against 59: 8 steps an epoch, the last of 8 rows on one rank and 3 on the other."""
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05), steps_per_execution=per_execution)
    counter = t.CountSteps()
    with t.warnings_of_tf_ooo() as lines:
        t.ours(model, t.data(engine.rank, 80 if engine.rank == 0 else 59), [counter], epochs=2)
    assert int(model.optimizer.iterations.numpy()) == 16
    assert counter.count == 2 * {1: 8, 3: 3}[per_execution]
    assert t.equal_on_all_ranks(engine, model)
    assert sum("each epoch ends after 8" in line for line in lines) == 1


def test_data_that_repeat_are_all_trained_on(engine):
    """``steps_per_epoch`` no multiple of ``steps_per_execution``: an epoch goes on where one has ended."""
    seen: list[Any] = []

    class Notes(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            tf.py_function(lambda x: seen.append(int(x)), [data[0][0, 0]], [])
            return super().train_step(data)

    inputs = keras.Input((3,))
    model = t.compiled(Notes(inputs, keras.layers.Dense(4)(inputs)), "sgd", steps_per_execution=8)
    rows = tf.repeat(tf.range(16.0)[:, None], 3, 1)
    dataset = tf.data.Dataset.from_tensor_slices((rows, tf.zeros(16, tf.int32))).batch(1).repeat()
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    model.fit(dataset, steps_per_epoch=5, epochs=3, verbose=0, callbacks=[callback])
    assert seen == list(range(15))


def test_data_that_end_within_an_execution(engine):
    """On all ranks, in a step that runs by itself: the epoch ends, as Keras says."""
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05), steps_per_execution=4)
    t.ours(model, t.data(engine.rank, 6 * t.ROWS), options={"unroll": 1}, steps_per_epoch=10)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert t.equal_on_all_ranks(engine, model)


def test_sparse_batches(engine):
    """Each rank has as many rows, but other numbers of values in them."""
    x, y = t.data(engine.rank, 80)
    x *= np.random.default_rng(engine.rank).random(x.shape) < 0.3
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(t.ROWS)
    model.fit(dataset, verbose=0, callbacks=[tf_ooo.OOOBackprop(mode="data_parallel")])
    assert int(model.optimizer.iterations.numpy()) == 10
    assert t.equal_on_all_ranks(engine, model)
