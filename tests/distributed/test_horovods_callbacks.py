"""Horovod's callbacks, as keras_callbacks has them, on two ranks: alone and beside OOOBackprop."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_callbacks
import tf_ooo
from tests.same_bits import bits_of

pytestmark = [pytest.mark.takes(30), pytest.mark.ranks(2)]


def model_of(seed, rate=0.1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(9, activation="relu"), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", jit_compile=False)
    return model


def data_of(rank):
    rng = np.random.default_rng(rank)
    return rng.normal(size=(24, 7)).astype("float32"), rng.normal(size=(24, 3)).astype("float32")


class Seen(keras.callbacks.Callback):
    """Notes what a callback behind others is told, and the rate of each batch."""

    def __init__(self):
        super().__init__()
        self.logs, self.rates = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


def fit(model, rank, *callbacks, epochs=2):
    x, y = data_of(rank)
    return model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def test_all_ranks_begin_as_rank_0(engine):
    """Alone: what is trained before the first batch ends is taken from rank 0 as well, as in Horovod."""
    model = model_of(engine.rank)
    weights = []
    told = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append([w.tolist() for w in model.get_weights()])
    )
    fit(model, engine.rank, keras_callbacks.BroadcastGlobalVariablesCallback(0), told, epochs=1)
    first, *later = engine.gather(weights[0]), engine.gather(weights[2])
    assert first[0] == first[1]
    assert later[0][0] != later[0][1], "nothing averages their gradients"


def test_logs_are_averaged(engine):
    alone, averaged = Seen(), Seen()
    fit(model_of(5), engine.rank, alone, keras_callbacks.MetricAverageCallback(), averaged)
    for before, after in zip(engine.gather(alone.logs)[0], averaged.logs, strict=True):
        assert set(before) == set(after) == {"loss"}
    ranks = engine.gather(alone.logs)
    assert ranks[0] != ranks[1]
    expected = [(one["loss"] + two["loss"]) / 2 for one, two in zip(*ranks, strict=True)]
    assert [logs["loss"] for logs in averaged.logs] == pytest.approx(expected, rel=1e-12)


def test_the_rate_rises_to_that_of_all_ranks(engine):
    """From 0.2 / 2 to 0.2 in two epochs of three batches; what comes after is left alone."""
    seen, model = Seen(), model_of(5)
    warmup = keras_callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1)
    halving = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch == 3 and setattr(model.optimizer, "learning_rate", 0.05)
    )
    fit(model, engine.rank, warmup, halving, seen, epochs=4)
    rising = [0.1 * (1 + share / 6) for share in range(6)]
    assert seen.rates == pytest.approx([*rising, 0.2, 0.2, 0.2, 0.05, 0.05, 0.05], rel=1e-6)


def test_beside_ours_nothing_changes(engine):
    """Ours alone, and with these two: the same bits on both ranks."""
    bits = []
    for more in (
        [],
        [keras_callbacks.BroadcastGlobalVariablesCallback(), keras_callbacks.MetricAverageCallback()],
    ):
        model = model_of(engine.rank)
        history = fit(model, engine.rank, tf_ooo.OOOBackprop(mode="data_parallel"), *more)
        bits.append([bits_of(model), history.history])
    assert bits[0] == bits[1]
    ranks = engine.gather(bits[0])
    assert ranks[0] == ranks[1]


def test_what_cannot_be_done_is_said(engine):
    with pytest.raises(tf_ooo.errors.OptionsError, match="root_rank=1 is not accepted"):
        keras_callbacks.BroadcastGlobalVariablesCallback(1)
    model = model_of(5, keras.optimizers.schedules.CosineDecay(0.1, 10))
    with pytest.raises(tf_ooo.errors.OptionsError, match="learning_rate is a schedule"):
        fit(model, engine.rank, keras_callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2))
    with pytest.raises(tf_ooo.errors.OptionsError, match="give steps_per_epoch"):
        model_of(5).fit(
            (data_of(0) for _ in range(3)),
            verbose=0,
            callbacks=[keras_callbacks.LearningRateWarmupCallback(0.2)],
        )
