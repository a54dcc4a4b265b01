"""Checks run by worker.py on every rank: several steps in one flat function."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import training as t
from checks_fit import CountSteps

from tf_ooo.bench.workloads import encoder


def _against_stock(engine: Any, make: Any, optimizer: Any, per_rank: Any = t.data, **more: Any) -> None:
    """50 steps, 8 of them together, then 2: the bits of stock Horovod step by step."""
    a = t.compiled(make(), optimizer())
    b = t.compiled(make(), optimizer(), steps_per_execution=8)
    t.stock_in_apply(a, per_rank(engine.rank))
    history = t.ours(b, per_rank(engine.rank), **more).history
    assert np.isfinite(history["loss"]).all()
    assert t.same_bits(a, b)
    assert t.equal_on_all_ranks(engine, b)


def check_unrolled_momentum(engine: Any) -> None:
    _against_stock(engine, t.mlp, lambda: keras.optimizers.SGD(0.05, momentum=0.9))


def check_unrolled_adam_with_clipping(engine: Any) -> None:
    _against_stock(engine, t.tied, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))


def check_unrolled_weight_decay_and_batch_norm(engine: Any) -> None:
    _against_stock(engine, t.with_batch_norm, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02))


def check_unrolled_embedding(engine: Any) -> None:
    _against_stock(engine, t.with_embedding, lambda: keras.optimizers.Adam(0.01), t.words)


def check_embedding_in_steps_together(engine: Any) -> None:
    """With either engine: rows travel one by one, other numbers of them on each rank."""
    a, b = (
        t.compiled(t.with_embedding(), keras.optimizers.Adam(0.01), steps_per_execution=k) for k in (1, 8)
    )
    t.ours(a, t.words(engine.rank))
    t.ours(b, t.words(engine.rank), options={"schedule": "fast_forward"})
    assert t.same_bits(a, b)
    assert t.equal_on_all_ranks(engine, b)


def check_unrolled_encoder(engine: Any) -> None:
    """Sums of several gradients: TensorFlow adds them in the order of their names."""

    def make() -> keras.Model:
        keras.backend.clear_session()  # the same layer names each time
        return encoder(layers=1, width=16, heads=2, length=6, vocabulary=20, classes=4)

    _against_stock(engine, make, lambda: keras.optimizers.SGD(0.05, momentum=0.9), t.words)


def check_unrolled_gradient_accumulation(engine: Any) -> None:
    _against_stock(engine, t.mlp, lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3))


def check_unrolled_moving_averages_frozen_layer_class_weights(engine: Any) -> None:
    models = []
    for steps_per_execution in (1, 8):
        optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7)
        model = t.with_batch_norm()
        model.layers[0].trainable = False
        models.append(t.compiled(model, optimizer, steps_per_execution=steps_per_execution))
    more = {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0, 3: 3.0}}
    t.stock_in_apply(models[0], t.data(engine.rank), **more)
    t.ours(models[1], t.data(engine.rank), **more)
    assert t.same_bits(*models)
    assert t.equal_on_all_ranks(engine, models[1])


def check_what_callbacks_see_between_executions(engine: Any) -> None:
    """A checkpoint taken there holds every update."""
    seen: list[dict[int, Any]] = []
    for steps_per_execution in (1, 8):
        model = t.compiled(t.mlp(), keras.optimizers.Adam(0.01), steps_per_execution=steps_per_execution)
        at: dict[int, Any] = {}
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, at=at, model=model: at.setdefault(
                int(model.optimizer.iterations.numpy()), model.get_weights()
            )
        )
        t.ours(model, t.data(engine.rank), [note], options={"schedule": "fast_forward"})
        seen.append(at)
    assert sorted(seen[1]) == [8, 16, 24, 32, 40, 48, 50]
    for steps, weights in seen[1].items():
        for one, other in zip(weights, seen[0][steps], strict=True):
            np.testing.assert_array_equal(one, other)


def check_unrolled_learning_rate_schedule(engine: Any) -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 7, 0.8)
    _against_stock(engine, t.mlp, lambda: keras.optimizers.SGD(decay))


def check_unrolled_loss_scaling(engine: Any) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        make = keras.optimizers.LossScaleOptimizer
        _against_stock(engine, t.mlp, lambda: make(keras.optimizers.SGD(0.05), dynamic_growth_steps=10))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def check_unrolled_logs_are_those_of_keras(engine: Any) -> None:
    """What callbacks see after each execution, and at the end of the epoch, with metrics."""
    seen: list[list[Any]] = []
    for unroll in (1, 8):
        model = t.compiled(t.mlp(), "adam", metrics=["accuracy"], steps_per_execution=8)
        mine: list[Any] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, mine=mine: mine.append(
                (batch, {k: float(v) for k, v in logs.items()})
            ),
            on_epoch_end=lambda epoch, logs, mine=mine: mine.append((epoch, dict(logs))),
        )
        options = {"unroll": unroll}
        t.ours(model, t.data(engine.rank, 20 * t.ROWS + 3), [note], epochs=2, options=options)
        seen.append(mine)
    assert len(seen[0]) == 8  # three executions an epoch and its end, twice
    assert seen[0] == seen[1]


def check_unrolled_stops(engine: Any) -> None:
    """``stop_training`` ends after the execution in which it is set, as in Keras."""
    model = t.compiled(t.mlp(), "adam", steps_per_execution=4)
    t.ours(model, t.data(engine.rank, 80), [CountSteps(stop_at=2)], epochs=3)
    assert int(model.optimizer.iterations.numpy()) == 8
    assert t.equal_on_all_ranks(engine, model)


def check_unrolled_in_parts(engine: Any) -> None:
    """An execution longer than ``unroll``; batches of unknown number; sample weights; a second fit."""
    a, b = (t.compiled(t.mlp(), "adam", steps_per_execution=k) for k in (1, 9))
    x, y = t.data(engine.rank, 21 * t.ROWS)
    weights = np.linspace(0.5, 1.5, len(x)).astype("float32")
    for model in (a, b):
        for _ in range(2):
            t.ours(model, (x, y), sample_weight=weights, options={"unroll": 4, "lockstep": "execution"})
    assert int(b.optimizer.iterations.numpy()) == 42
    assert t.same_bits(a, b)
