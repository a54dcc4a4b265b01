"""``python -m tests.fuzz.kinds COUNT SEED``: what users write themselves, stock against ours.

A pipeline must train as stock up to rounding, or refuse in an error of tf_ooo before a weight changes, or
have a note in its report.  One device must have the same bits, or a report that says rounding.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_ooo

KINDS = (
    "plain", "sparse", "ops over rows", "Lambda over rows", "Softmax over rows", "variance in the loss",
    "own logs", "SpectralNormalization", "counter", "frozen", "frozen after compile", "remat",
    "autograph loop", "scaled gradients", "mixed_float16", "BatchNormalization", "two models",
)  # fmt: skip
TOLERANCE = 1e-5
layers = keras.layers


class Counting(layers.Layer):
    """Adds 1 to a weight of its own in each step."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(1.0)
        return x


class Stepping(keras.Model):
    """A train_step of one's own, of the kind that is drawn."""

    kind = ""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.kind == "scaled gradients":
            gradients = [g * (1.0 + tf.reduce_max(tf.abs(prediction))) for g in gradients]
        if self.kind == "autograph loop":
            tf.while_loop(lambda n: n < 2, lambda n: n + 1, [tf.constant(0)])
        self.optimizer.apply(gradients, self.trainable_variables)
        logs = {"loss": loss}
        if self.kind == "own logs":
            logs |= {"rows": tf.shape(x)[0], "largest": tf.reduce_max(prediction)}
            logs |= {"norm": tf.linalg.global_norm(gradients), "rate": self.optimizer.learning_rate}
        return logs


def middle(kind: str, draw: random.Random) -> list[Any]:
    """The layers of the kind, between two dense layers."""
    ops = keras.ops
    of_kind = {
        "Lambda over rows": lambda: layers.Lambda(lambda h: h - ops.mean(h, axis=0, keepdims=True)),
        "Softmax over rows": lambda: layers.Softmax(axis=0),
        "SpectralNormalization": lambda: layers.SpectralNormalization(
            layers.Dense(draw.choice((5, 8)), "relu")
        ),
        "counter": Counting,
        "frozen": lambda: layers.Dense(6, "tanh", trainable=False),
        "BatchNormalization": layers.BatchNormalization,
    }
    return [of_kind[kind]()] if kind in of_kind else []


def train(kind: str, number: int, *callbacks: Any) -> tuple[list[np.ndarray], list[Any], bool]:
    """Weights, logs, and whether a weight had changed where it was refused."""
    draw = random.Random(number)
    keras.backend.clear_session()
    keras.utils.set_random_seed(number)
    keras.config.set_dtype_policy("mixed_float16" if kind == "mixed_float16" else "float32")
    numbers = np.random.default_rng(number)
    x, y = (numbers.normal(size=(16, width)).astype("float32") for width in (6, 2))
    i = keras.Input((6,), sparse=kind == "sparse")
    h = layers.Dense(draw.choice((5, 8)), draw.choice(("relu", "tanh")))(i)
    for layer in middle(kind, draw):
        h = layer(h)
    if kind == "ops over rows":
        h = h / (1.0 + keras.ops.std(h, axis=0, keepdims=True))
    inner = layers.Dense(draw.choice((5, 8)), "tanh")
    inner.build(h.shape)
    h = layers.Lambda(lambda t: keras.remat(inner)(t))(h) if kind == "remat" else inner(h)
    own = kind in ("own logs", "autograph loop", "scaled gradients")
    output = layers.Dense(2, dtype="float32")(h)
    model = (Stepping if own else keras.Model)(i, output)
    model.kind = kind
    term = draw.choice((1e-3, 0.1, 1.0))

    def with_variance(true: Any, predicted: Any) -> Any:
        return tf.reduce_mean((true - predicted) ** 2) + term * tf.math.reduce_variance(predicted)

    # Every weight moves by more than rounding; no update is a quotient of two that are nearly none.
    optimizers = keras.optimizers
    optimizer = draw.choice(
        (
            optimizers.SGD(0.05),
            optimizers.Adam(0.01, epsilon=1e-3),
            optimizers.RMSprop(0.01, epsilon=1e-3),
            optimizers.Adagrad(0.01),
        )
    )
    model.compile(optimizer, with_variance if kind == "variance in the loss" else "mse", jit_compile=False)
    given = tf.sparse.from_dense(np.maximum(x, 0)) if kind == "sparse" else x
    data = tf.data.Dataset.from_tensor_slices((given, y)).batch(8)
    if kind == "frozen after compile":
        model.fit(data, verbose=0)
        model.layers[1].trainable = False
    if kind == "two models":
        other = keras.Sequential([keras.Input((6,)), layers.Dense(3, "relu"), layers.Dense(2)])
        other.compile("adam", "mse", jit_compile=False)
        other.fit(data, verbose=0)
    before = [w.numpy() for w in model.weights]
    try:
        history = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks)).history
    except tf_ooo.OOOError as error:
        changed = any(not np.array_equal(a, w) for a, w in zip(before, model.weights, strict=True))
        error.changed = changed
        raise
    finally:
        keras.config.set_dtype_policy("float32")
    return [w.numpy() for w in model.weights], [history[name] for name in sorted(history)], False


def outcome_of(number: int, pipeline: bool) -> str:
    """``good``, ``said``, ``refused``, or what is wrong."""
    kind = KINDS[number % len(KINDS)]
    draw = random.Random(-number)
    options: dict[str, Any] = {"mode": "single_device", "schedule": "fast_forward", "profile_steps": 0}
    if pipeline:
        schedule = draw.choice(("gpipe", "1f1b", "zb_h1"))
        options = {"mode": "pipeline", "devices": 2, "microbatches": draw.choice((1, 2, 4))}
        options |= {"schedule": schedule, "profile_steps": draw.choice((0, 1)), "fall_back": False}
    stock = train(kind, number)
    callback = tf_ooo.OOOBackprop(**options)
    try:
        ours = train(kind, number, callback)
    except tf_ooo.OOOError as error:
        return "WRONG: refused after a weight changed" if error.changed else "refused"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"[:300]
    pairs = [(a, b) for of_stock, of_ours in zip(stock[:2], ours[:2], strict=True)
             for a, b in zip(of_stock, of_ours, strict=True)]  # fmt: skip
    off = max(float(np.max(np.abs(np.subtract(a, b, dtype="float64")))) for a, b in pairs)
    report = callback.report
    if report.rewritten_graph is None:
        return f"WRONG: not rewritten: {report.fallback_reason}"
    said = bool(report.notes) if pipeline else "rounding" in f"{report.summary()} {report.notes}"
    tolerance = 0.0 if not pipeline else 1e-2 if kind == "mixed_float16" else TOLERANCE
    return "good" if off <= tolerance else f"said ({kind})" if said else f"WRONG: {off:.1e} off"


def main() -> None:
    """Half of the numbers as a pipeline, half on one device."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    count, seed = (int(value) for value in (*sys.argv[1:], "34", "1")[:2])
    counts: Counter[str] = Counter()
    for number in range(seed * 10**6, seed * 10**6 + count):
        for pipeline in (True, False):
            mode = "pipeline" if pipeline else "one device"
            outcome = outcome_of(number, pipeline)
            counts[f"{mode}: {outcome.partition(':')[0]}"] += 1
            if outcome.startswith("WRONG"):
                print(f"{number}, {mode}, {KINDS[number % len(KINDS)]}: {outcome}", flush=True)
    print("\n".join(f"{kind}: {times}" for kind, times in sorted(counts.items())))
    raise SystemExit(any("WRONG" in kind for kind in counts))


if __name__ == "__main__":
    main()
