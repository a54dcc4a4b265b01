"""Models, data and settings that a mode cannot train, or can, against what one would think."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.malformed.case import Case, Draw
from tests.malformed.fits import WIDTH, data, perceptron, refused_or_trains

Model = Callable[[], Any]


def compiled(model: Any, **settings: Any) -> Any:
    import keras

    model.compile(keras.optimizers.SGD(0.1), **({"loss": "mse", "jit_compile": False} | settings))
    return model


def _layers(*layers: Any, **settings: Any) -> Any:
    import keras

    keras.utils.set_random_seed(3)
    return compiled(keras.Sequential([keras.Input((WIDTH,)), *layers]), **settings)


def _models() -> Mapping[str, Model]:
    """By what is odd of them; some train."""
    import keras
    import tensorflow as tf
    from keras import layers

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layers.Dense(4, "relu"), layers.Dense(2)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.first(x))

    class OwnStep(Own):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    class Failing(Own):
        def train_step(self, batch: Any) -> Any:
            raise ValueError("the step of this model is not written yet")

    class NoUpdate(Own):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            return {"loss": tf.reduce_mean((self(x) - y) ** 2)}

    class Eager(Own):
        def train_step(self, batch: Any) -> Any:
            logs = super().train_step(batch)
            return {name: float(value) for name, value in logs.items()}

    class Clipped(Own):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def not_compiled() -> Any:
        return keras.Sequential([keras.Input((WIDTH,)), layers.Dense(2)])

    def frozen() -> Any:
        model = _layers(layers.Dense(4), layers.Dense(2))
        model.trainable = False
        return compiled(model)

    def nested() -> Any:
        inner = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(4, "relu"), layers.Dense(4)])
        x = keras.Input((WIDTH,))
        return compiled(keras.Model(x, layers.Dense(2)(inner(x))))

    def outputs() -> Any:
        x = keras.Input((WIDTH,))
        h = layers.Dense(4, "relu")(x)
        return compiled(keras.Model(x, [layers.Dense(2)(h), layers.Dense(1)(h)]))

    def shared() -> Any:
        dense, x = layers.Dense(WIDTH), keras.Input((WIDTH,))
        return compiled(keras.Model(x, layers.Dense(2)(dense(dense(x)))))

    def of(kind: type, **settings: Any) -> Model:
        return lambda: compiled(kind(), **settings)

    def no_optimizer() -> Any:
        model = not_compiled()
        model.compile(loss="mse", optimizer=None)
        return model

    def other_rows(truth: Any, output: Any) -> Any:
        return tf.reduce_mean((truth - tf.reverse(output, [0])) ** 2)

    return {
        "not compiled": not_compiled,
        "without an optimizer": no_optimizer,
        "without a loss": lambda: _layers(layers.Dense(2), loss=None),
        "frozen": frozen,
        "without weights": lambda: _layers(layers.Flatten(), loss="mse"),
        "of one layer": lambda: _layers(layers.Dense(2)),
        "of another output": lambda: _layers(layers.Dense(3)),
        "with a loss that sums": lambda: _layers(
            layers.Dense(4), layers.Dense(2), loss=keras.losses.MeanSquaredError(reduction="sum")
        ),
        "with a loss that compares rows": lambda: _layers(layers.Dense(4), layers.Dense(2), loss=other_rows),
        "with batch normalization": lambda: _layers(
            layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)
        ),
        "with dropout": lambda: _layers(layers.Dense(4), layers.Dropout(0.5), layers.Dense(2)),
        "with a loss of itself": lambda: _layers(layers.Dense(4, activity_regularizer="l2"), layers.Dense(2)),
        "that runs eagerly": lambda: _layers(layers.Dense(4), layers.Dense(2), run_eagerly=True),
        "with XLA": lambda: _layers(layers.Dense(4), layers.Dense(2), jit_compile=True),
        "with steps_per_execution=3": lambda: _layers(
            layers.Dense(4), layers.Dense(2), steps_per_execution=3
        ),
        "nested": nested,
        "of several outputs": outputs,
        "with a shared layer": shared,
        "not built": of(Own),
        "not built, with XLA": of(Own, jit_compile=True),
        "with a train_step of its own": of(OwnStep),
        "whose train_step raises": of(Failing),
        "whose train_step updates nothing": of(NoUpdate),
        "whose train_step makes floats": of(Eager),
        "whose train_step clips": of(Clipped),
        "usual": perceptron,
    }


def _inputs() -> Mapping[str, Callable[[], tuple[Any, Any]]]:
    x, y = data()
    return {
        "usual": lambda: (x, y),
        "one row": lambda: (x[:1], y[:1]),
        "11 rows": lambda: (x[:11], y[:11]),
        "no rows": lambda: (x[:0], y[:0]),
        "NaN": lambda: (x * np.nan, y),
        "other rows": lambda: (x, y[:-1]),
        "another width": lambda: (x[:, :3], y),
        "texts": lambda: (np.array([["a"] * WIDTH] * len(x)), y),
        "integers": lambda: (x.astype("int32"), y),
        "float64": lambda: (x.astype("float64"), y),
        "None": lambda: (None, None),
        "a list of rows": lambda: (x.tolist(), y.tolist()),
    }


def _wrong_costs() -> Any:
    """Return the costs of a model with more layers than there are."""
    from tests.malformed.costs import layers
    from tf_ooo.costs import Link
    from tf_ooo.costs.table import CostTable

    return CostTable(tuple(dataclasses.replace(layer, inputs=None) for layer in layers()), Link(1e-5, 1e9))


def _callbacks() -> Mapping[str, tuple[Callable[[Path], Any], tuple[str, ...]]]:
    """By how they are written; what is named where they are refused."""
    import tf_ooo

    def ours(
        text: str, *named: str, **options: Any
    ) -> tuple[str, tuple[Callable[[Path], Any], tuple[str, ...]]]:
        return text, (lambda folder: tf_ooo.OOOBackprop(**options), named)

    single, pipeline = {"mode": "single_device", "strict": True}, {"mode": "pipeline", "devices": 2}
    layerpipe = {"mode": "layerpipe", "devices": 2}
    return dict(
        (
            ours("strict", **single),
            ours("not strict", mode="single_device"),
            ours("in_order, strict", schedule="in_order", **single),
            ours("with a limit of one byte", "memory_limit_bytes", memory_limit_bytes=1, **single),
            ours("with a folder that cannot be", timeline="/proc/no/such", **single),
            ours("dumped into a file", dump_dir="/dev/null/x", **single),
            ours("with gains that are not there", "no/gains.json", gains="no/gains.json", **single),
            ours("for XLA, without it", streams=2, **single),
            ours("as a pipeline", **pipeline),
            ours("as a pipeline, zb_v", schedule="zb_v", **pipeline),
            ours("as a pipeline of 3 micro-batches", "microbatches", "rows", microbatches=3, **pipeline),
            ours(
                "as a pipeline of 1000 micro-batches", "microbatches", "rows", microbatches=1000, **pipeline
            ),
            ours("as a pipeline on 7 devices", "devices=7", mode="pipeline", devices=7),
            ours("as a pipeline on one device", mode="pipeline", devices=1),
            ours("as a pipeline on GPUs", "GPU:0", mode="pipeline", devices=["GPU:0", "GPU:1"]),
            ours("as a pipeline on the same device", "twice", mode="pipeline", devices=["CPU:0", "CPU:0"]),
            ours("as a pipeline on CPU:9", "CPU:9", mode="pipeline", devices=["CPU:0", "CPU:9"]),
            ours(
                "as a pipeline of one byte", "memory_limit_bytes", "bytes", memory_limit_bytes=1, **pipeline
            ),
            ours("as a pipeline with other costs", "costs", "layers", costs=_wrong_costs(), **pipeline),
            ours("as a pipeline of 9 chunks", "chunks", schedule="interleaved_1f1b", chunks=9, **pipeline),
            ours("as a pipeline of 9 layers a group", "group", schedule="modulo", group=9, **pipeline),
            ours("as two replicas", "replicas=2", mode="pipeline", devices=2, replicas=2),
            ours("as a layerpipe", **layerpipe),
            ours("as a layerpipe, ema", weights="ema", **layerpipe),
            ours("as a layerpipe on 9 devices", "devices=9", mode="layerpipe", devices=9),
            ours("as a layerpipe with other costs", "costs", "layers", costs=_wrong_costs(), **layerpipe),
            ours("data parallel", mode="data_parallel"),
            ours("data parallel by Horovod", "horovod", mode="data_parallel", engine="horovod"),
            ours("data parallel by collectives", "TF_CONFIG", mode="data_parallel", engine="collectives"),
        )
    )


def drawn_models(draw: Draw) -> Case:
    """A model, its data and a callback; at most two of the three are odd."""
    models, inputs, callbacks = _models(), _inputs(), _callbacks()
    model, given, callback = draw.choice(list(models)), "usual", draw.choice(list(callbacks))
    if draw.chance(0.3):
        given, model = draw.choice(list(inputs)), draw.choice(("usual", "with a train_step of its own"))
    make, named = callbacks[callback]
    text = f"a model {model}, data: {given}, {callback}"
    odd = model != "usual" or given != "usual"

    def attempt(folder: Path) -> None:
        batch = inputs[given]()
        if model == "of several outputs":
            batch = (batch[0], [batch[1], batch[1][:, :1]])
        refused_or_trains(models[model], batch, make(folder), epochs=2)

    return Case("models", text, [] if odd or not named else [list(named)], attempt)
