"""Callbacks on ranks: wherever they are listed they see what all ranks see, and act alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed import training as t

pytestmark = [pytest.mark.ranks(2), pytest.mark.takes(40)]


def model_of(**more):
    return t.compiled(t.mlp(), keras.optimizers.SGD(0.05), **more)


def seen_by(logs):
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, own: logs.append(dict(own)))


def same_on_all_ranks(engine, value):
    return len({str(theirs) for theirs in engine.gather(value)}) == 1


def validation_of(rank):
    """Rank 0's gets worse with training, rank 1's better: alone they would stop at different times."""
    x, y = t.data(rank, 40)
    return (x, (y + 1) % 4) if rank == 0 else (x, y)


@pytest.mark.parametrize("before", [True, False])
def test_early_stopping_and_plateaus_wherever_they_are_listed(engine, before):
    model, logs = model_of(), []
    theirs = [
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5),
        seen_by(logs),
    ]
    ours = tf_ooo.OOOBackprop(mode="data_parallel")
    callbacks = [*theirs, ours] if before else [ours, *theirs]
    t.fit(model, t.data(engine.rank, 80), callbacks, epochs=12, validation_data=validation_of(engine.rank))
    assert t.equal_on_all_ranks(engine, model)
    assert same_on_all_ranks(engine, logs)
    assert same_on_all_ranks(engine, float(model.optimizer.learning_rate))
    assert [log["val_loss"] for log in logs] == model.history.history["val_loss"]


def test_nan_on_one_rank_stops_all_at_once(engine):
    x, y = t.data(engine.rank, 80)
    if engine.rank == 1:
        x[4 * t.ROWS] = np.nan  # in the fifth of ten steps
    model, started = model_of(), time.monotonic()
    ours = tf_ooo.OOOBackprop(mode="data_parallel")
    t.fit(model, (x, y), [keras.callbacks.TerminateOnNaN(), ours], epochs=3, shuffle=False)
    took_s = time.monotonic() - started
    assert int(model.optimizer.iterations.numpy()) == 5
    print(f"ended after {took_s:.1f} s")  # the limit of the test is far below the ten minutes of before


def test_an_epoch_without_a_step_does_not_take_place(engine, caplog):
    """Rank 1 has data for one epoch only; nobody hears of a loss of 0."""
    begun = []

    def rows() -> Iterator[Any]:
        begun.append(1)
        if engine.rank == 0 or len(begun) == 1:
            yield from zip(*t.data(engine.rank, 80), strict=True)

    spec = (tf.TensorSpec((12,), tf.float32), tf.TensorSpec((), tf.int64))
    batches = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(t.ROWS)
    model, logs = model_of(), []
    callbacks = [seen_by(logs), tf_ooo.OOOBackprop(mode="data_parallel")]
    model.fit(batches, epochs=3, verbose=0, callbacks=callbacks)
    assert len(logs) == 1
    assert logs[0]["loss"] > 0
    assert "epoch 2 does not take place" in caplog.text
    assert t.equal_on_all_ranks(engine, model)


def test_a_rank_whose_data_end_early_ends_the_epoch_for_all(engine, caplog):
    model = model_of()
    rows = 80 if engine.rank == 0 else 40
    acts = keras.callbacks.TerminateOnNaN()  # so that ranks ask before each step
    t.ours(model, t.data(engine.rank, rows), [acts], epochs=1, steps_per_epoch=10)
    assert int(model.optimizer.iterations.numpy()) == 5
    assert t.equal_on_all_ranks(engine, model)
    told = "rank 1's data ended 5 batches before the end of the epoch"
    assert (told in caplog.text) == (engine.rank == 1)


def test_an_evaluation_with_the_callback_is_that_of_all_ranks(engine):
    """80 rows and 40, each row counting the same; without the callback each rank has its own."""
    model = model_of(metrics=["accuracy"])
    parts = [t.data(0, 80), t.data(1, 40)]
    expected = model.evaluate(*map(np.concatenate, zip(*parts, strict=True)), verbose=0)
    ours = tf_ooo.OOOBackprop(mode="data_parallel")
    got = model.evaluate(*parts[engine.rank], verbose=0, callbacks=[ours])
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    own = model.evaluate(*parts[engine.rank], verbose=0)
    assert not same_on_all_ranks(engine, own)
    named = model.evaluate(*parts[engine.rank], verbose=0, callbacks=[ours], return_dict=True)
    np.testing.assert_allclose([named["loss"], named["accuracy"]], got)


def test_synchronized_normalization_is_refused(engine):
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True)]
    model = t.compiled(keras.Sequential([keras.Input((12,)), *layers]), keras.optimizers.SGD(0.05))
    with pytest.raises(tf_ooo.errors.BackendError, match="batch_normalization.*synchronized=True is over"):
        t.ours(model, t.data(engine.rank, 80))


def test_different_numbers_of_epochs_are_refused(engine):
    with pytest.raises(tf_ooo.errors.OptionsError, match=r"rank 1 has options.epochs 3, rank 0 has 2"):
        t.ours(model_of(), t.data(engine.rank, 80), epochs=2 + engine.rank)
