"""The fit does more than steps: it begins, stops, averages logs, puts the model back."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed import training as t
from tf_ooo.compat import tf_functions

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [pytest.mark.ranks(2), pytest.mark.takes(25)]


def test_a_part_of_the_step_that_is_a_function(engine, quick_plans):
    """Traced before, without averaging; and after the fit it trains alone again."""

    class Updates(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": self.update(*data)}

        @tf.function
        def update(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            return loss

    inputs = keras.Input((12,))
    model = t.compiled(Updates(inputs, keras.layers.Dense(4)(inputs)), keras.optimizers.SGD(0.05))
    t.fit(model, t.data(0, 2 * t.ROWS))
    for per_execution in (1, 4):
        model.steps_per_execution = per_execution
        t.ours(model, t.data(engine.rank, 80))
        assert t.equal_on_all_ranks(engine, model)
    model.steps_per_execution = 1
    if engine.rank == 0:
        t.fit(model, t.data(engine.rank, t.ROWS))
    engine.barrier()
    assert not t.equal_on_all_ranks(engine, model)


def test_eager_and_unbuilt(engine):
    """Made by the first step, on each rank other weights."""
    keras.utils.set_random_seed(engine.rank)
    model = keras.Sequential([keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(4)])
    model = t.compiled(model, keras.optimizers.Adam(0.01), run_eagerly=True)
    t.ours(model, t.data(engine.rank, 3 * t.ROWS))
    assert t.equal_on_all_ranks(engine, model)
    assert int(model.optimizer.iterations.numpy()) == 3


def test_without_a_step_all_have_what_rank_0_has(engine):
    """A training that had ended and is started again: rank 0 alone restores its backup."""
    model = t.compiled(t.mlp(), keras.optimizers.Adam(0.01), rank=engine.rank)
    before = t.bits(model)
    with t.warnings_of_tf_ooo() as warnings:
        t.ours(model, t.data(engine.rank), epochs=2, initial_epoch=2)
    assert t.equal_on_all_ranks(engine, model)
    assert (t.bits(model) == before) == (engine.rank == 0)
    assert warnings == []


def test_all_ranks_stop_within_an_epoch(engine):
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    t.ours(model, t.data(engine.rank, 80), [t.CountSteps(stop_at=5)], epochs=3)
    assert int(model.optimizer.iterations.numpy()) == 5
    assert t.equal_on_all_ranks(engine, model)


def test_one_rank_stops_after_an_epoch(engine):
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    counter = t.CountSteps(stop_after_epoch=1 if engine.rank == 0 else None)
    t.ours(model, t.data(engine.rank, 80), [counter], epochs=4)
    assert int(model.optimizer.iterations.numpy()) == 20
    assert t.equal_on_all_ranks(engine, model)


def test_logs_are_averaged(engine):
    """Weighted by samples: 80 rows and 40, all of them in one batch; validation on 16 rows and 48."""
    rows, test_rows = (80, 16) if engine.rank == 0 else (40, 48)
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.0), metrics=["accuracy"])
    x, y = (np.concatenate(parts) for parts in zip(t.data(0, 80), t.data(1, 40), strict=True))
    loss, accuracy = model.evaluate(x, y, verbose=0)
    parts = [tuple(a[:count] for a in t.data(rank, 80)) for rank, count in ((0, 16), (1, 48))]
    test_loss, test_accuracy = model.evaluate(*map(np.concatenate, zip(*parts, strict=True)), verbose=0)
    xy = t.data(engine.rank, 80)
    mine = tuple(a[:rows] for a in t.data(engine.rank, 80 if engine.rank == 0 else 40))
    validation = tuple(a[:test_rows] for a in xy)
    seen: list[Any] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    t.ours(model, mine, [note], batch_size=80, options={"weighting": "samples"}, validation_data=validation)
    history = model.history.history
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)
    np.testing.assert_allclose(history["accuracy"], [accuracy], rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], [test_loss], rtol=1e-5)
    np.testing.assert_allclose(history["val_accuracy"], [test_accuracy], rtol=1e-5)
    assert {name: values[0] for name, values in history.items()} == seen[0]
    assert len({tuple(values) for values in engine.gather([history["val_loss"][0], history["loss"][0]])}) == 1


@pytest.mark.parametrize("drifts", [True, False])
def test_ranks_that_drift_apart_are_warned_of(engine, drifts):
    """A callback writes a weight on one rank, in the second of three epochs."""

    def write(batch: int, logs: Any) -> None:
        if drifts and engine.rank == 1 and int(model.optimizer.iterations.numpy()) == 15:
            model.trainable_weights[0].assign_add(np.full((12, 16), 1e-3, np.float32))

    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    writes = keras.callbacks.LambdaCallback(on_train_batch_end=write)
    with t.warnings_of_tf_ooo() as lines:
        t.ours(model, t.data(engine.rank, 10 * t.ROWS), [writes], epochs=3)
    warned = [line for line in lines if "the trainable weights are not the same on all ranks" in line]
    told = [["after", "epoch", "2"], ["after", "epoch", "3"], ["at", "the", "end"]]
    assert [line.split()[:3] for line in warned] == (told if drifts else [])


def test_numbers_of_names_may_differ(engine):
    """Keras numbers layers and variables within a process; one rank has made some more before."""

    class Scaled(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.scale

    def model() -> Any:
        noise = keras.layers.GaussianNoise(0.1, seed=engine.rank)
        masking = keras.layers.Masking(mask_value=float("nan"))
        dense = keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotNormal())
        return keras.Sequential([masking, Scaled(), noise, dense])

    for _ in range(engine.rank):
        model()
    trained = t.compiled(model(), keras.optimizers.SGD(0.05))
    t.ours(trained, t.data(engine.rank, 80))
    assert t.equal_on_all_ranks(engine, trained)
    keras.backend.clear_session()  # the numbers are the same again in later tests


def traces(train_function):
    steps = tf_functions.functions_of(train_function)
    return [concrete for step in steps for concrete in tf_functions.concrete_functions_of(step)]


@pytest.mark.parametrize("traced", [True, False])
def test_the_model_is_put_back(engine, traced):
    """After fit the model trains alone; a second fit needs no new trace, with the callback or without.

    Keras' train function that has no trace yet is made anew, once: a later fit without the callback traces it
    as Keras would have done first.
    """
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    if traced:
        t.fit(model, t.data(engine.rank, 2 * t.ROWS))
    else:
        model.make_train_function()
    before = model.train_function
    callback = t.ours(model, t.data(engine.rank, 80))
    stock, traced_before = model.train_function, traces(model.train_function)
    assert (stock is before) == (traced or not t.KERAS_3)
    assert bool(traced_before) == traced
    assert "apply" not in vars(model.optimizer)
    assert "train_step" not in vars(model)
    first = callback._life.mode.ranks.step.function
    t.fit(model, t.data(engine.rank, 80), [callback])
    assert callback._life.mode.ranks.step.function is first
    assert t.communicates(callback, model)
    assert t.equal_on_all_ranks(engine, model)
    t.fit(model, t.data(engine.rank, 80))
    assert model.train_function is stock
    assert not traced or traces(stock) == traced_before
    assert not t.equal_on_all_ranks(engine, model)
    model.train_on_batch(*t.data(engine.rank, t.ROWS))
    assert not t.equal_on_all_ranks(engine, model)
    assert callback.report.mode == "data_parallel"


def test_auto_means_data_parallel_here(engine):
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    callback = tf_ooo.OOOBackprop()
    t.fit(model, t.data(engine.rank, 80), [callback])
    assert callback.report.mode == "data_parallel"
    assert t.communicates(callback, model)
    assert t.equal_on_all_ranks(engine, model)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_a_layer_flipped_after_compile_trains_as_in_stock(engine, quick_plans, frozen_first):
    """Keras keeps its traced step until the model is compiled again; so do the ranks, with a plan of ours."""
    trained = []
    for train in (t.fit, lambda *args: t.ours(*args, options={"schedule": "search", "compare": False})):
        model = t.deep()
        flipped = model.layers[1]
        flipped.trainable = not frozen_first
        model = t.compiled(model, keras.optimizers.SGD(0.05))
        xy = t.data(0)  # the same on all ranks, so that their mean is stock's gradient
        train(model, xy)
        flipped.trainable = frozen_first
        before = flipped.get_weights()
        train(model, xy)
        moves = [not np.array_equal(*pair) for pair in zip(before, flipped.get_weights(), strict=True)]
        assert moves == [not frozen_first] * 2
        trained.append(model.get_weights())
    for stock, weights in zip(*trained, strict=True):
        np.testing.assert_allclose(weights, stock, rtol=1e-4, atol=1e-6)
