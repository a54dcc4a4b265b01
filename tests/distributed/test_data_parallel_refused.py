"""All ranks refuse what would train them apart, before the first step or after it."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import tf_ooo
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.hosts.ranks import roll

horovod = pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed; run: make horovod")
pytestmark = pytest.mark.ranks(2)


@pytest.fixture(autouse=True)
def _ranks_come_to_the_same_error_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one rank may come to it seconds after the other, which is not lost."""
    monkeypatch.setattr(roll, "_WORD_S", 60.0)


def _refused(engine: Any, model: Any, match: str, **more: Any) -> None:
    before = t.bits(model)
    with pytest.raises(tf_ooo.OptionsError, match=match):
        t.ours(model, t.data(engine.rank, 80), **more)
    assert t.bits(model) == before


def _dense(units: int) -> keras.Model:
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(units), keras.layers.Dense(4)])


def _some_layers(count: int) -> keras.Model:
    return keras.Sequential([keras.Input((12,)), *(keras.layers.Dense(4) for _ in range(count))])


def _with(layer: Any) -> keras.Model:
    return keras.Sequential([keras.Input((12,)), layer, keras.layers.Dense(4)])


# Rank 1 differs in this: its model, the model of rank 0, what is said.
OTHER_MODELS = {
    "units": (lambda: _dense(17), lambda: _dense(16), r"rank 1 has weights\[0\].*17.*rank 0 has.*16"),
    "number_of_weights": (lambda: _some_layers(3), lambda: _some_layers(2), "rank 1 has 6 weights"),
    "activation": (
        lambda: _with(keras.layers.Dense(4, activation="tanh")),
        lambda: _with(keras.layers.Dense(4, activation="relu")),
        r"rank 1 has layers\[\d\].* rank 0 has",
    ),
    "dropout": (
        lambda: _with(keras.layers.Dropout(0.25)),
        lambda: _with(keras.layers.Dropout(0.5)),
        r"rank 1 has layers\[\d\].* rank 0 has",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_different_models_are_refused(engine, name):
    of_rank_1, of_rank_0, said = OTHER_MODELS[name]
    _refused(engine, t.compiled((of_rank_1 if engine.rank == 1 else of_rank_0)(), "sgd"), said)


# Rank 1 differs in this: its arguments, those of rank 0, what is said.
OTHER_ARGUMENTS = {
    "batch": ({"batch_size": 4}, {"batch_size": 8}, r"rank 1 has batch.*4\], rank 0 has.*8\]"),
    "op": ({"options": {"op": "Sum"}}, {"options": {"op": "Average"}}, 'rank 1 has options.op "Sum"'),
    "epoch": ({"initial_epoch": 2, "epochs": 4}, {"initial_epoch": 0, "epochs": 4}, "different epochs.*0, 2"),
}


@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_different_arguments_of_fit_are_refused(engine, name):
    of_rank_1, of_rank_0, said = OTHER_ARGUMENTS[name]
    more = of_rank_1 if engine.rank == 1 else of_rank_0
    _refused(engine, t.compiled(t.mlp(), "sgd"), said, **more)


def test_different_optimizers_are_refused(engine):
    model = t.compiled(t.mlp(), "adam" if engine.rank == 1 else "sgd")
    _refused(engine, model, r"rank 1 has optimizers\[0\].*")


def test_different_losses_are_refused(engine):
    model = t.mlp()
    model.compile("sgd", "mse" if engine.rank == 1 else "mae", jit_compile=False)
    _refused(engine, model, 'rank 1 has loss "mse", rank 0 has "mae"')


def test_a_part_that_is_not_averaged_is_refused(engine):
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


@needs_keras_3  # by a step of Keras 3
def test_a_step_without_averaging_is_refused(engine):
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


def test_training_by_others_within_fit_is_refused(engine):
    """``train_on_batch`` in a callback makes a train function that averages nothing."""
    batch = t.data(engine.rank, t.ROWS)
    trains = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda n, logs: n or callback.model.train_on_batch(*batch)
    )
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    with pytest.raises(tf_ooo.BackendError, match="train_on_batch, or make_train_function, was called in"):
        t.fit(model, t.data(engine.rank, 80), [callback, trains])


@pytest.mark.alone
def test_a_fit_after_horovod_was_shut_down_says_to_restart(engine):
    horovod.shutdown()
    model = t.compiled(t.mlp(), keras.optimizers.SGD(0.05))
    with pytest.raises(tf_ooo.BackendError, match="stopped before training: .* Restart all workers"):
        t.ours(model, t.data(engine.rank, 80))
