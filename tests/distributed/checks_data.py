"""Checks run by worker.py on every rank: data of other lengths and kinds, with either engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import training as t
from checks_fit import CountSteps, warnings_of_tf_ooo

import tf_ooo


def check_ranks_with_fewer_batches(engine: Any) -> None:
    """80 rows against 59: 8 steps an epoch, the last of 8 rows on one rank and 3 on the other."""
    for per_execution in (1, 3):
        model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05), steps_per_execution=per_execution)
        counter = CountSteps()
        with warnings_of_tf_ooo() as lines:
            t.ours(model, t.data(engine.rank, 80 if engine.rank == 0 else 59), [counter], epochs=2)
        assert int(model.optimizer.iterations.numpy()) == 16
        assert t.equal_on_all_ranks(engine, model)
        assert sum("each epoch ends after 8" in line for line in lines) == 1


def check_embedding_and_batches_of_other_sizes(engine: Any) -> None:
    """Other numbers of rows on each rank, and from step to step; at last none at all on one of them."""
    for per_execution in (1, 3):
        model = t.compiled(t.with_embedding(), keras.optimizers.Adam(0.01), steps_per_execution=per_execution)
        t.ours(model, t.words(engine.rank, 80 if engine.rank == 0 else 59), epochs=2)
        assert int(model.optimizer.iterations.numpy()) == 16
        assert t.equal_on_all_ranks(engine, model)
    for rows in ([3, 5], [4, 0], [0, 0]):
        mine = rows[engine.rank % 2]
        slices = tf.IndexedSlices(tf.ones([mine, 2]) * (engine.rank + 1.0), tf.range(mine))
        found = engine.allreduce([("rows", slices)], "Sum", "none")[0]
        expected = [rank + 1.0 for rank in range(2) for _ in range(rows[rank])]
        np.testing.assert_array_equal(found.values, np.repeat(expected, 2).reshape(-1, 2))
        np.testing.assert_array_equal(found.indices, [i for count in rows for i in range(count)])


def check_unknown_number_of_batches(engine: Any) -> None:
    def rows() -> Iterator[Any]:
        yield from zip(*t.data(engine.rank, 80 if engine.rank == 0 else 59), strict=True)

    spec = (tf.TensorSpec((12,), tf.float32), tf.TensorSpec((), tf.int64))
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    dataset = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(t.ROWS)
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.numpy()) == 16
    assert t.equal_on_all_ranks(engine, model)


def check_data_that_repeat_are_all_trained_on(engine: Any) -> None:
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


def check_data_that_end_within_an_execution(engine: Any) -> None:
    """On all ranks, in a step that runs by itself: the epoch ends, as Keras says."""
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05), steps_per_execution=4)
    t.ours(model, t.data(engine.rank, 6 * t.ROWS), options={"unroll": 1}, steps_per_epoch=10)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert t.equal_on_all_ranks(engine, model)


def check_sparse_batches(engine: Any) -> None:
    """As many rows on each rank, but other numbers of values in them."""
    x, y = t.data(engine.rank, 80)
    x *= np.random.default_rng(engine.rank).random(x.shape) < 0.3
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(t.ROWS)
    model.fit(dataset, verbose=0, callbacks=[tf_ooo.OOOBackprop(mode="data_parallel")])
    assert int(model.optimizer.iterations.numpy()) == 10
    assert t.equal_on_all_ranks(engine, model)


def check_half_precision_embedding(engine: Any) -> None:
    """A table of bfloat16, which Horovod does not know."""
    layers = [
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(20, 8, dtype="bfloat16"),
        keras.layers.Flatten(),
        keras.layers.Dense(4),
    ]
    model = t.compiled(keras.Sequential(layers), keras.optimizers.SGD(0.05))
    t.ours(model, t.words(engine.rank, 80))
    assert t.equal_on_all_ranks(engine, model)
