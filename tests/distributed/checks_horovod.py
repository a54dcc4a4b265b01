"""Checks run by worker.py on every rank: what only Horovod has."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
import training as t
from checks_fit import warnings_of_tf_ooo

import tf_ooo


def check_horovods_optimizer_is_detected(engine: Any) -> None:
    import horovod.tensorflow.keras as hvd

    a = t.compiled(t.mlp(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    b = t.compiled(t.mlp(), keras.optimizers.Adam(0.01))
    with warnings_of_tf_ooo() as lines:
        t.ours(a, t.data(engine.rank, 80))
    assert [line for line in lines if "averages nothing with Keras 3" in line] == lines
    assert len(lines) == 1
    t.ours(b, t.data(engine.rank, 80))
    assert t.same_bits(a, b)


def check_horovods_optimizer_averages(engine: Any) -> None:
    """With Keras 2 it does, and is left to it: the bits are those of stock Horovod."""
    import horovod.tensorflow.keras as hvd

    a, b = (
        t.compiled(t.mlp(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.5)))
        for _ in range(2)
    )
    t.fit(a, t.data(engine.rank, 80))
    t.ours(b, t.data(engine.rank, 80))
    assert t.same_bits(a, b)
    assert t.equal_on_all_ranks(engine, b)


def check_auto_means_data_parallel_here(engine: Any) -> None:
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    callback = tf_ooo.OOOBackprop()
    t.fit(model, t.data(engine.rank, 80), [callback])
    assert callback.report.mode == "data_parallel"
    assert t.equal_on_all_ranks(engine, model)


def check_sync_batch_norm_is_no_averaged_gradient(engine: Any) -> None:
    """Horovod's synchronized BatchNorm communicates within the backward pass; weights still are averaged."""

    class Shared(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            import horovod.tensorflow as hvd

            return x - hvd.allreduce(tf.reduce_mean(x, 0), op=hvd.Average)

    layers = [keras.Input((12,)), keras.layers.Dense(8), Shared(), keras.layers.Dense(4)]
    model = t.compiled(keras.Sequential(layers), keras.optimizers.SGD(0.05))
    t.ours(model, t.data(engine.rank, 80))
    assert t.equal_on_all_ranks(engine, model)
