"""Models, data and settings that a mode cannot train, or can, against what one would think."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.drawing import Draw
from tests.malformed.case import Case
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
        clips = False

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            if self.clips:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    class Clipped(OwnStep):
        clips = True

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

    def two(between: Model | None = None, **settings: Any) -> Model:
        """Two layers, and what stands between them."""
        return lambda: _layers(
            layers.Dense(4), *([between()] if between else []), layers.Dense(2), **settings
        )

    return {
        "usual": perceptron,
        "not compiled": not_compiled,
        "without an optimizer": no_optimizer,
        "without a loss": lambda: _layers(layers.Dense(2), loss=None),
        "frozen": frozen,
        "without weights": lambda: _layers(layers.Flatten(), loss="mse"),
        "of one layer": lambda: _layers(layers.Dense(2)),
        "of another output": lambda: _layers(layers.Dense(3)),
        "with a loss that sums": two(loss=keras.losses.MeanSquaredError(reduction="sum")),
        "with a loss that compares rows": two(loss=other_rows),
        "with batch normalization": two(layers.BatchNormalization),
        "with dropout": two(lambda: layers.Dropout(0.5)),
        "with a loss of itself": two(lambda: layers.Dense(4, activity_regularizer="l2")),
        "that runs eagerly": two(run_eagerly=True),
        "with XLA": two(jit_compile=True),
        "with steps_per_execution=3": two(steps_per_execution=3),
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


def _callbacks() -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Options of callbacks; what is named where they are refused."""
    single, pipeline = {"mode": "single_device", "strict": True}, {"mode": "pipeline", "devices": 2}
    layerpipe, data_parallel = {"mode": "layerpipe", "devices": 2}, {"mode": "data_parallel"}
    wrong_costs = {"costs": _wrong_costs()}
    return [
        (single, ()),
        ({"mode": "single_device"}, ()),
        ({**single, "schedule": "in_order"}, ()),
        ({**single, "memory_limit_bytes": 1}, ("memory_limit_bytes",)),
        ({**single, "timeline": "/proc/no/such"}, ()),
        ({**single, "dump_dir": "/dev/null/x"}, ()),
        ({**single, "gains": "no/gains.json"}, ("no/gains.json",)),
        ({**single, "streams": 2}, ()),  # without XLA
        (pipeline, ()),
        ({**pipeline, "schedule": "zb_v"}, ()),
        ({**pipeline, "microbatches": 3}, ("microbatches", "rows")),
        ({**pipeline, "microbatches": 1000}, ("microbatches", "rows")),
        ({**pipeline, "devices": 7}, ("devices=7",)),
        ({**pipeline, "devices": 1}, ()),
        ({**pipeline, "devices": ["GPU:0", "GPU:1"]}, ("GPU:0",)),
        ({**pipeline, "devices": ["CPU:0", "CPU:0"]}, ("twice",)),
        ({**pipeline, "devices": ["CPU:0", "CPU:9"]}, ("CPU:9",)),
        ({**pipeline, "memory_limit_bytes": 1}, ("memory_limit_bytes", "bytes")),
        ({**pipeline, **wrong_costs}, ("costs", "layers")),
        ({**pipeline, "schedule": "interleaved_1f1b", "chunks": 9}, ("chunks",)),
        ({**pipeline, "schedule": "modulo", "group": 9}, ("group",)),
        ({**pipeline, "replicas": 2}, ("replicas=2",)),
        (layerpipe, ()),
        ({**layerpipe, "weights": "ema"}, ()),
        ({**layerpipe, "devices": 9}, ("devices=9",)),
        ({**layerpipe, **wrong_costs}, ("costs", "layers")),
        (data_parallel, ()),
        ({**data_parallel, "engine": "horovod"}, ("horovod",)),
        ({**data_parallel, "engine": "collectives"}, ("TF_CONFIG",)),
    ]


def drawn_models(draw: Draw) -> Case:
    """A model, its data and a callback; at most two of the three are odd."""
    models, inputs = _models(), _inputs()
    model, given, (options, named) = draw.choice(list(models)), "usual", draw.choice(_callbacks())
    if draw.chance(0.3):
        given, model = draw.choice(list(inputs)), draw.choice(("usual", "with a train_step of its own"))
    shown = ", ".join(f"{name}={value!r:.60}" for name, value in options.items())
    odd = model != "usual" or given != "usual"

    def attempt(folder: Path) -> None:
        import tf_ooo

        batch = inputs[given]()
        if model == "of several outputs":
            batch = (batch[0], [batch[1], batch[1][:, :1]])
        refused_or_trains(models[model], batch, tf_ooo.OOOBackprop(**options), epochs=2)

    text = f"a model {model}, data: {given}, OOOBackprop({shown})"
    return Case("models", text, [] if odd or not named else [list(named)], attempt)
