"""Run by test_layerpipe_models.py in a process of its own: logical CPUs must be set up first.

``python layerpipe_models.py CHECK...`` prints one line of JSON: what each check found.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tests.scripts import print_found
from tf_ooo import compat
from tf_ooo.compat import path_of as path
from tf_ooo.costs.table import CostTable
from tf_ooo.pipeline.compat import value_of

RATE, BATCHES, ROWS = 0.2, 14, 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS * BATCHES - 5, 7)).astype("float32")  # the last batch is smaller
WORDS = RNG.integers(0, 29, size=(len(X), 6))
Y = RNG.integers(0, 3, len(X))
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Tied(keras.Model):
    """An embedding that is the output's kernel too."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(29, 8)
        self.middle = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(8)]

    def call(self, words):
        hidden = self.embedding(words)
        for layer in self.middle:
            hidden = hidden + layer(hidden)
        return tf.tensordot(hidden, tf.transpose(self.embedding.embeddings), 1)


def embedded():
    """The embedding's gradient is IndexedSlices."""
    layers = [keras.layers.Embedding(29, 8), keras.layers.Flatten(), keras.layers.Dense(9, activation="relu")]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


def two_inputs():
    a, b = keras.Input((7,)), keras.Input((6,))
    left = keras.layers.Dense(11, activation="relu")(a)
    right = keras.layers.Dense(13, activation="relu")(b)
    both = keras.layers.Dense(10, activation="tanh")(keras.layers.Concatenate()([left, right]))
    return keras.Model([a, b], keras.layers.Dense(3)(both))


def mlp():
    layers = [keras.layers.Dense(width, activation="relu") for width in (33, 21, 17)]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def normalized():
    """Normalizations' scales have gradients as late as their layers'."""
    layers = [
        keras.layers.Reshape((7, 1, 1)),
        keras.layers.Conv2D(5, (3, 1), padding="same"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(11, activation="relu"),
        keras.layers.LayerNormalization(),
    ]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def used_twice():
    """The second layer's weights are the fourth's too."""
    shared = keras.layers.Dense(9, activation="tanh")
    inputs = keras.Input((7,))
    x = shared(keras.layers.Dense(9, activation="tanh")(inputs))
    x = shared(keras.layers.Dense(9, activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


class Custom(keras.Model):
    """A train_step of its own that returns a loss which is no metric."""

    def __init__(self):
        super().__init__()
        self.inside = [
            keras.layers.Dense(12, activation="relu"),
            keras.layers.Dense(9),
            keras.layers.Dense(3),
        ]

    def call(self, x, training=False):
        for layer in self.inside:
            x = layer(x)
        return x

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = squared(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def squared(y, outputs):
    return tf.reduce_mean(tf.square(outputs - tf.one_hot(y, 3)))


CASES = {
    "tied": (Tied, (WORDS, np.roll(WORDS, 1, 1)), LOSS),
    "embedded": (embedded, (WORDS, Y), LOSS),
    "two_inputs": (two_inputs, ((X, (WORDS / 29).astype("float32")), Y), LOSS),
    "custom_train_step": (Custom, (X, Y), squared),
    "bfloat16": (mlp, (X, Y), LOSS),
    "normalized": (normalized, (X, Y), LOSS),
    "used_twice": (used_twice, (X, Y), LOSS),
}


# A normalization's scale and offset may be layers of their own.
MORE_LAYERS = {"normalized": 1}


def made(make, batch, loss, optimizer=None):
    """A compiled model, built."""
    keras.utils.set_random_seed(3)
    model = make()
    keras_loss = loss if loss is LOSS else None
    metrics = ["accuracy"] if keras_loss else None
    model.compile(optimizer or keras.optimizers.SGD(RATE), keras_loss, metrics=metrics, jit_compile=False)
    model(batch[0])
    return model


def batches(data):
    starts = range(0, len(X), ROWS)
    return [tf.nest.map_structure(lambda part, n=n: part[n : n + ROWS], data) for n in starts]


def by_hand(make, data, loss, delays):
    """The weights after plain gradient descent in which each variable's gradients are so many steps late."""
    model = made(make, batches(data)[0], loss)
    variables = model.trainable_variables
    history = [[v.numpy() for v in variables]]
    for number, (x, y) in enumerate(batches(data)):
        for place, variable in enumerate(variables):
            variable.assign(history[max(0, number - delays[place])][place])
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, [value_of(v) for v in variables])
        history.append(
            [w - RATE * tf.convert_to_tensor(g) for w, g in zip(history[-1], gradients, strict=True)]
        )
    return history[-1]


def coalesced_by_hand(make, data, loss, optimizer, every, epochs):
    """Groups of batches at the weights of one update before; an epoch ends with a smaller group."""
    model = made(make, batches(data)[0], loss, optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)
    newest = [v.numpy() for v in variables]
    for _ in range(epochs):
        before = newest
        for start in range(0, len(batches(data)), every):
            assign(variables, before)
            group = [_dense(model, batch, loss) for batch in batches(data)[start : start + every]]
            assign(variables, newest)
            means = [tf.add_n(same) / len(group) for same in zip(*group, strict=True)]
            compat.update(optimizer, means, variables)
            before, newest = newest, [v.numpy() for v in variables]
    return newest


def assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _dense(model, batch, loss):
    x, y = batch
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    return [
        tf.convert_to_tensor(g)
        for g in tape.gradient(value, [value_of(v) for v in model.trainable_variables])
    ]


def two_versions():
    """PipeDream-2BW through two epochs of fit, with optimizers that have state and read the weights."""
    found = {}
    for name in ("tied", "embedded"):
        make, data, loss = CASES[name]
        optimizers = [keras.optimizers.AdamW(0.02, weight_decay=0.05, clipnorm=0.5) for _ in range(2)]
        model = made(make, batches(data)[0], loss, optimizers[0])
        start = model.get_weights()
        layers = len({path(v).rpartition("/")[0] for v in model.trainable_variables})
        callback = spread(3, layers, schedule="pipedream_2bw")
        fit(model, callback, data, epochs=2)
        expected = coalesced_by_hand(make, data, loss, optimizers[1], 4, 2)
        report = callback.report
        found[name] = {
            "distance": max(
                float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), expected, strict=True)
            ),
            "moved": max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), start, strict=True)),
            "updates": int(optimizers[0].iterations.numpy()),
            "report": report.layerpipe,
            "weights_bytes": sum(w.nbytes for w in model.get_weights()),
            "summary": report.summary(),
            "notes": report.notes,
        }
    return found


def spread(devices, layers, **options):
    costs = CostTable([tf_ooo.LayerCosts(1.0, 1.2, 0.9, name=str(n)) for n in range(layers)])
    given = {"schedule": "layerpipe", "costs": costs} | options
    return tf_ooo.OOOBackprop(mode="layerpipe", devices=devices, **given)


def fit(model, callback, data, *more, **arguments):
    whole = tf.data.Dataset.from_generator(
        lambda: iter(batches(data)),
        output_signature=tf.nest.map_structure(
            lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), data
        ),
    )
    return model.fit(whole, verbose=0, callbacks=[callback, *more], **arguments).history


def against_by_hand(name):
    make, data, loss = CASES[name]
    model = made(make, batches(data)[0], loss)
    layers = len({path(v).rpartition("/")[0] for v in model.trainable_variables})
    callback = spread(3, layers + MORE_LAYERS.get(name, 0))
    history = fit(model, callback, data)
    delays = callback.report.layerpipe["delay_steps"]
    late = [delays[path(v)] for v in model.trainable_variables]
    expected, in_time = (by_hand(make, data, loss, some) for some in (late, [0] * len(late)))
    got = [v.numpy() for v in model.trainable_variables]

    def distance(a, b):
        return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))

    return {
        "distance": distance(got, expected),
        "matters": distance(got, in_time),
        "delays": delays,
        "planned": {row["name"]: row["delay_steps"] for row in callback.report.layers},
        "loss": history["loss"],
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def models():
    found = {}
    for name in CASES:
        policy = "mixed_bfloat16" if name == "bfloat16" else "float32"
        keras.mixed_precision.set_global_policy(policy)
        found[name] = against_by_hand(name)
    keras.mixed_precision.set_global_policy("float32")
    return found


class After(keras.callbacks.Callback):
    """Stops training, or raises, after some batches."""

    def __init__(self, count, error=None):
        super().__init__()
        self.count, self.error, self.seen = count, error, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.count:
            if self.error is not None:
                raise self.error
            self.model.stop_training = True


def places(model):
    return sorted({value_of(v).device[-5:] for v in (*model.variables, *model.optimizer.variables)})


def endings():
    """Stopped training ends with the updates of all batches that were taken; an error puts all back."""
    _, data, loss = CASES["bfloat16"]
    stopped, all_of_them = (made(mlp, batches(data)[0], loss) for _ in range(2))
    fit(stopped, spread(3, 4), data, After(5))
    taken = int(stopped.optimizer.iterations.numpy())
    whole = tf.nest.map_structure(lambda part: part[: taken * ROWS], data)
    all_of_them.fit(*whole, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[spread(3, 4)])
    failed, error = made(mlp, batches(data)[0], loss), ""
    callback = spread(3, 4)
    try:
        fit(failed, callback, data, After(5, RuntimeError("stopped here")))
    except RuntimeError as raised:
        error = str(raised)
    back = places(failed)
    fit(failed, callback, data)
    return {
        "taken": taken,
        "distance": max(
            float(np.abs(a - b).max())
            for a, b in zip(stopped.get_weights(), all_of_them.get_weights(), strict=True)
        ),
        "places": [places(stopped), back, places(failed)],
        "error": error,
        "finite": all(bool(np.isfinite(w).all()) for w in failed.get_weights()),
    }


if __name__ == "__main__":
    print_found(globals(), sys.argv[1:], devices=3)
