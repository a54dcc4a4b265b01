"""Checks run by worker.py on every rank: the same bits as stock Horovod, and as one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import training as t


def _against_stock(engine: Any, make: Any, optimizer: Any, per_rank: Any = t.data, **more: Any) -> None:
    a, b = (t.compiled(make(), optimizer()) for _ in range(2))
    before = b.get_weights()
    t.stock_in_apply(a, per_rank(engine.rank), **more)
    t.ours(b, per_rank(engine.rank), **more)
    assert not np.array_equal(before[0], b.get_weights()[0])
    assert t.same_bits(a, b)
    assert t.equal_on_all_ranks(engine, b)


def check_sgd_momentum(engine: Any) -> None:
    _against_stock(engine, t.mlp, lambda: keras.optimizers.SGD(0.05, momentum=0.9))


def check_adam_with_clipping(engine: Any) -> None:
    _against_stock(engine, t.tied, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))


def check_weight_decay_and_batch_norm(engine: Any) -> None:
    _against_stock(engine, t.with_batch_norm, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02))


def check_embedding(engine: Any) -> None:
    _against_stock(engine, t.with_embedding, lambda: keras.optimizers.Adam(0.01), t.words)


def check_gradient_accumulation(engine: Any) -> None:
    _against_stock(engine, t.mlp, lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3))


def check_loss_scaling(engine: Any) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        make = keras.optimizers.LossScaleOptimizer
        _against_stock(engine, t.mlp, lambda: make(keras.optimizers.SGD(0.05), dynamic_growth_steps=10))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def check_overflow_on_one_rank(engine: Any) -> None:
    x, y = t.data(engine.rank, 5 * t.ROWS)
    if engine.rank == 1:
        x[0, 0] = np.inf
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    model = t.compiled(t.mlp(), optimizer)
    t.ours(model, (x, y))
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**14
    assert np.isfinite(model.get_weights()[0]).all()
    assert t.equal_on_all_ranks(engine, model)


def check_horovods_tape(engine: Any) -> None:
    """Equal bits with a step that averages in the tape; and that step is not averaged twice."""
    models = [t.compiled(t.mlp(), keras.optimizers.Adam(0.01))]
    models += [t.compiled(t.tape_model(t.mlp()), keras.optimizers.Adam(0.01)) for _ in range(2)]
    t.ours(models[0], t.data(engine.rank))
    t.fit(models[1], t.data(engine.rank))
    t.ours(models[2], t.data(engine.rank), options={"op": "Sum"})
    assert t.same_bits(models[0], models[1])
    assert t.same_bits(models[1], models[2])


def check_joint_batch(engine: Any) -> None:
    a, b = (t.compiled(t.mlp(), keras.optimizers.Adam(0.003)) for _ in range(2))
    t.ours(a, t.data(engine.rank))
    t.fit(b, t.joint(t.data, engine.size), batch_size=engine.size * t.ROWS)
    for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)


def check_joint_batch_of_an_embedding(engine: Any) -> None:
    """Keras squares each occurrence of a row by itself: all ranks' rows have to arrive one by one."""
    a, b = (t.compiled(t.with_embedding(), keras.optimizers.Adam(0.003)) for _ in range(2))
    t.ours(a, t.words(engine.rank))
    t.fit(b, t.joint(t.words, engine.size), batch_size=engine.size * t.ROWS)
    for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)


def check_joint_batch_of_uneven_parts(engine: Any) -> None:
    """weighting="samples": ranks with batches of 5 and 11 rows are like one process with 16."""
    x, y = t.joint(t.data, engine.size)
    cuts, rows = [0, 5, 16] if engine.size == 2 else [0, 16], 16
    mine = slice(cuts[engine.rank], cuts[engine.rank + 1])
    x_mine, y_mine = (a.reshape(-1, rows, *a.shape[1:])[:, mine].reshape(-1, *a.shape[1:]) for a in (x, y))
    batch = mine.stop - mine.start
    for together in (1, 8):
        a, b = (
            t.compiled(t.mlp(), keras.optimizers.SGD(0.05, momentum=0.9), steps_per_execution=k)
            for k in (together, 1)
        )
        t.ours(a, (x_mine, y_mine), options={"weighting": "samples"}, batch_size=batch)
        t.fit(b, (x, y), batch_size=rows)
        for one, other in zip(a.get_weights(), b.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)


def check_several_steps_per_execution(engine: Any) -> None:
    _against_stock_model = [t.compiled(t.mlp(), "adam", steps_per_execution=k) for k in (1, 4)]
    for model in _against_stock_model:
        t.ours(model, t.data(engine.rank))
    assert t.same_bits(*_against_stock_model)


def check_eager(engine: Any) -> None:
    a, b = (t.compiled(t.mlp(), keras.optimizers.SGD(0.05), run_eagerly=eager) for eager in (False, True))
    for model in (a, b):
        t.ours(model, t.data(engine.rank, 5 * t.ROWS))
    assert t.equal_on_all_ranks(engine, b)
    np.testing.assert_allclose(a.get_weights()[0], b.get_weights()[0], rtol=1e-5, atol=1e-6)
