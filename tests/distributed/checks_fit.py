"""Checks run by worker.py on every rank: what ``fit`` does around the steps, with either engine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import training as t

import tf_ooo
from tf_ooo.data_parallel.sync import checksum


class CountSteps(keras.callbacks.Callback):
    """Counts executions; asks to stop where told."""

    def __init__(self, stop_at: int | None = None, stop_after_epoch: int | None = None) -> None:
        super().__init__()
        self.count, self.stop_at, self.stop_after_epoch = 0, stop_at, stop_after_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.count == self.stop_at:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.stop_after_epoch:
            self.model.stop_training = True


@contextlib.contextmanager
def warnings_of_tf_ooo() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tf_ooo").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("tf_ooo").removeHandler(handler)


class Adversaries(keras.Model):
    """Two networks, each with an optimizer of its own; nothing is built before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.makes = keras.layers.Dense(12)
        self.judges = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        self.optimizers = {"makes": keras.optimizers.Adam(0.01)}

    def compile(self, judge_optimizer: Any) -> None:
        super().compile(jit_compile=False)
        self.judge_optimizer = judge_optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape(persistent=True) as tape:
            made = self.makes(x[:, :3])
            fooled = tf.reduce_mean(tf.nn.softplus(-self.judges(made)))
            caught = tf.reduce_mean(tf.nn.softplus(self.judges(made)) + tf.nn.softplus(-self.judges(x)))
        for optimizer, loss, part in (
            (self.optimizers["makes"], fooled, self.makes),
            (self.judge_optimizer, caught, self.judges),
        ):
            grads = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(grads, part.trainable_variables, strict=True))
        return {"fooled": fooled, "caught": caught}


def check_two_optimizers_unbuilt(engine: Any) -> None:
    keras.utils.set_random_seed(engine.rank)
    model = Adversaries()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    t.ours(model, t.data(engine.rank, 6 * t.ROWS))
    state = [*model.weights, *model.judge_optimizer.variables, *model.optimizers["makes"].variables]
    assert len(set(engine.gather(checksum(state)))) == 1
    assert int(model.judge_optimizer.iterations.numpy()) == 6


def check_a_part_of_the_step_that_is_a_function(engine: Any) -> None:
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


def check_eager_and_unbuilt(engine: Any) -> None:
    """Made by the first step, on each rank other weights."""
    keras.utils.set_random_seed(engine.rank)
    model = keras.Sequential([keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(4)])
    model = t.compiled(model, keras.optimizers.Adam(0.01), run_eagerly=True)
    t.ours(model, t.data(engine.rank, 3 * t.ROWS))
    assert t.equal_on_all_ranks(engine, model)
    assert int(model.optimizer.iterations.numpy()) == 3


def check_first_weights_and_optimizer_state_come_from_rank_0(engine: Any) -> None:
    model = t.compiled(t.with_batch_norm(), keras.optimizers.Adam(0.01), rank=engine.rank)
    model.optimizer.build(model.trainable_weights)
    for variable in model.optimizer.variables[2:]:
        variable.assign(variable + float(engine.rank))
    model.optimizer.learning_rate = 0.01 * (1 + engine.rank)
    t.ours(model, t.data(engine.rank, t.ROWS))
    assert t.equal_on_all_ranks(engine, model)
    assert len(set(engine.gather(checksum(model.optimizer.variables)))) == 1


def check_one_rank_stops_within_an_epoch(engine: Any) -> None:
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    counter = CountSteps(stop_at=5 if engine.rank == 1 else None)
    t.ours(model, t.data(engine.rank, 80), [counter], epochs=3, options={"lockstep": "execution"})
    assert int(model.optimizer.iterations.numpy()) == 5
    assert t.equal_on_all_ranks(engine, model)


def check_all_ranks_stop_within_an_epoch(engine: Any) -> None:
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    t.ours(model, t.data(engine.rank, 80), [CountSteps(stop_at=5)], epochs=3)
    assert int(model.optimizer.iterations.numpy()) == 5
    assert t.equal_on_all_ranks(engine, model)


def check_one_rank_stops_after_an_epoch(engine: Any) -> None:
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    counter = CountSteps(stop_after_epoch=1 if engine.rank == 0 else None)
    t.ours(model, t.data(engine.rank, 80), [counter], epochs=4)
    assert int(model.optimizer.iterations.numpy()) == 20
    assert t.equal_on_all_ranks(engine, model)


def check_logs_are_averaged(engine: Any) -> None:
    """Weighted by samples: 80 rows and 40, all of them in one batch; validation on 16 rows each."""
    rows = 80 if engine.rank == 0 else 40
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.0), metrics=["accuracy"])
    x, y = (np.concatenate(parts) for parts in zip(t.data(0, 80), t.data(1, 40), strict=True))
    loss, accuracy = model.evaluate(x, y, verbose=0)
    xy = t.data(engine.rank, 80)
    mine = tuple(a[:rows] for a in t.data(engine.rank, 80 if engine.rank == 0 else 40))
    validation = tuple(a[:16] for a in xy)
    seen: list[Any] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    history = t.ours(
        model, mine, [note], batch_size=80, options={"weighting": "samples"}, validation_data=validation
    ).history
    np.testing.assert_allclose(history["loss"], [loss], rtol=1e-5)
    np.testing.assert_allclose(history["accuracy"], [accuracy], rtol=1e-5)
    assert {name: values[0] for name, values in history.items()} == seen[0]
    assert len({tuple(values) for values in engine.gather([history["val_loss"][0], history["loss"][0]])}) == 1


def _refused(engine: Any, model: Any, match: str, xy: Any = None, **more: Any) -> None:
    with pytest.raises(tf_ooo.OptionsError, match=match):
        t.ours(model, xy or t.data(engine.rank, 80), **more)
    engine.barrier()


def check_different_ranks_are_refused(engine: Any) -> None:
    other = engine.rank == 1
    model = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(17 if other else 16), keras.layers.Dense(4)]
    )
    _refused(engine, t.compiled(model, "sgd"), r"rank 1 has weights\[0\].*17.*rank 0 has.*16")
    layers = [keras.layers.Dense(4) for _ in range(3 if other else 2)]
    _refused(
        engine, t.compiled(keras.Sequential([keras.Input((12,)), *layers]), "sgd"), "rank 1 has 6 weights"
    )
    _refused(engine, t.compiled(t.mlp(), "adam" if other else "sgd"), r"rank 1 has optimizers\[0\].*")
    _refused(
        engine,
        t.compiled(t.mlp(), "sgd"),
        r"rank 1 has batch.*4\], rank 0 has.*8\]",
        batch_size=4 if other else 8,
    )
    for layer in (
        keras.layers.Dense(4, activation="tanh" if other else "relu"),
        keras.layers.Dropout(0.25 if other else 0.5),
    ):
        parts = [keras.Input((12,)), layer, keras.layers.Dense(4)]
        _refused(engine, t.compiled(keras.Sequential(parts), "sgd"), r"rank 1 has layers\[\d\].* rank 0 has")
    model = t.compiled(t.mlp(), "sgd")
    model.compile("sgd", "mse" if other else "mae", jit_compile=False)
    _refused(engine, model, 'rank 1 has loss "mse", rank 0 has "mae"')
    options = {"op": "Sum" if other else "Average"}
    _refused(engine, t.compiled(t.mlp(), "sgd"), 'rank 1 has options.op "Sum"', options=options)
    _refused(
        engine,
        t.compiled(t.mlp(), "sgd"),
        "different epochs.*0, 2",
        initial_epoch=2 if other else 0,
        epochs=4,
    )


def check_numbers_of_names_may_differ(engine: Any) -> None:
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
    keras.backend.clear_session()  # stock Horovod, with which other checks compare, would wait for ever


def check_a_part_that_is_not_averaged_is_refused(engine: Any) -> None:
    hidden = [keras.optimizers.SGD(0.1)]

    class HidesOne(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(self(data[0])))
            for part, optimizer in ((self.first, self.optimizer), (self.second, hidden[0])):
                weights = part.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    model = HidesOne()
    model.compile(keras.optimizers.SGD(0.05), jit_compile=False)
    model(t.data(0, 8)[0])
    hidden[0].build(model.second.trainable_variables)
    with pytest.raises(
        tf_ooo.BackendError, match="after the first step 2 weights, first .* not the same on all"
    ):
        t.ours(model, t.data(engine.rank, 80))
    engine.barrier()


def check_a_step_without_averaging_is_refused(engine: Any) -> None:
    hidden = [keras.optimizers.SGD(0.1)]

    class Hides(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0]) ** 2)
            hidden[0].apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    inputs = keras.Input((12,))
    model = Hides(inputs, keras.layers.Dense(3)(inputs))
    model.compile(jit_compile=False)
    hidden[0].build(model.trainable_variables)
    with pytest.raises(tf_ooo.BackendError, match="no gradient was averaged"):
        t.ours(model, t.data(engine.rank, 80))


def check_the_model_is_put_back(engine: Any) -> None:
    """After fit, and after a fit that raised, the model trains alone; a second fit needs no new trace."""
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    stock = model.make_train_function() or model.train_function
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    t.fit(model, t.data(engine.rank, 80), [callback])
    assert model.train_function is stock
    assert "apply" not in vars(model.optimizer)
    assert "train_step" not in vars(model)
    first = callback._session.step.function
    t.fit(model, t.data(engine.rank, 80), [callback])
    assert callback._session.step.function is first
    assert t.equal_on_all_ranks(engine, model)
    model.train_on_batch(*t.data(engine.rank, t.ROWS))
    assert not t.equal_on_all_ranks(engine, model)
    assert callback.report.mode == "data_parallel"


def check_training_by_others_within_fit_is_refused(engine: Any) -> None:
    """``train_on_batch`` in a callback makes a train function that averages nothing."""
    batch = t.data(engine.rank, t.ROWS)
    trains = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda n, logs: n or callback.model.train_on_batch(*batch)
    )
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    with pytest.raises(tf_ooo.BackendError, match="train_on_batch, or make_train_function, was called in"):
        t.fit(model, t.data(engine.rank, 80), [callback, trains])


def check_compression(engine: Any) -> None:
    """Values that 16 bits hold come back exact; others rounded, but the same on all ranks."""
    for compression in ("none", "fp16", "bf16"):
        exact = tf.reshape(tf.range(15, dtype=tf.float32), [3, 5]) * float(engine.rank + 1)
        random = tf.constant(np.random.default_rng(engine.rank).normal(size=1001).astype("float32"))

        @tf.function
        def both(exact: Any, random: Any, compression: str = compression) -> Any:
            named = [("exact", exact), ("random", random), ("int", tf.constant([3, 4]))]
            total = engine.allreduce(named, "Sum", compression)
            return total, engine.allreduce(named[:2], "Average", compression)

        total, mean = both(exact, random)
        scale = engine.size * (engine.size + 1) / 2
        np.testing.assert_array_equal(total[0], np.arange(15).reshape(3, 5) * scale)
        np.testing.assert_array_equal(mean[0], np.arange(15).reshape(3, 5) * scale / engine.size)
        np.testing.assert_array_equal(total[2], np.array([3, 4]) * engine.size)
        true = sum(np.random.default_rng(rank).normal(size=1001) for rank in range(engine.size))
        np.testing.assert_allclose(
            total[1], true, atol={"none": 1e-5, "fp16": 0.01, "bf16": 0.08}[compression]
        )
        assert len({tuple(values) for values in engine.gather(mean[1].numpy().tolist())}) == 1


def check_adasum(engine: Any) -> None:
    """Equal gradients count once, orthogonal ones are added."""
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([engine.rank]), tf.constant([engine.size + 1, 2]))
    gradients = [("equal", tf.constant([1.0, 2.0])), ("orthogonal", slices), ("zero", tf.zeros([2]))]
    if engine.size == 2:
        gradients.append(("uneven", tf.constant([1.0, 0.0]) if engine.rank == 0 else tf.constant([1.0, 1.0])))
    out = engine.allreduce(gradients, "Adasum", "none")
    np.testing.assert_allclose(out[0], [1.0, 2.0])
    np.testing.assert_allclose(out[1], [[1, 1]] * engine.size + [[0, 0]])
    np.testing.assert_allclose(out[2], [0.0, 0.0])
    if engine.size == 2:  # (1 - 1 / 2) (1, 0) + (1 - 1 / 4) (1, 1)
        np.testing.assert_allclose(out[3], [1.25, 0.75])


def check_adasum_in_fit(engine: Any) -> None:
    model = t.compiled(t.with_embedding(), keras.optimizers.SGD(0.05))
    t.ours(model, t.words(engine.rank, 80), options={"op": "Adasum", "compression": "fp16"})
    assert t.equal_on_all_ranks(engine, model)
