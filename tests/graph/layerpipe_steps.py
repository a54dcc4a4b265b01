"""Run by test_layerpipe_steps.py in a process of its own: logical CPUs must be set up first.

``python layerpipe_steps.py CHECK...`` prints one line of JSON: what each check found.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tests.graph import layerpipe_models as models
from tests.graph.layerpipe_fit import BATCHES, by_hand, costs_of, data, perceptron
from tests.scripts import print_found
from tf_ooo import compat
from tf_ooo.compat import path_of
from tf_ooo.costs.table import CostTable


def distance(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


# -- steps with conditions -------------------------------------------------------------------------


def batches_of(x, y):
    return tf.data.Dataset.from_generator(
        lambda: zip(x, y, strict=True),
        output_signature=tuple(tf.TensorSpec([None, part[0].shape[1]]) for part in (x, y)),
    )


def in_rounds(model, parts, **options):
    """Trains over four devices; its gradients are 6, 4, 2 and 0 steps late."""
    costs = CostTable([tf_ooo.LayerCosts(1.0, 1.0, 1.0) for _ in range(4)])
    given = {"costs": costs, "schedule": "pipedream"} | options
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=4, **given)
    model.fit(parts, verbose=0, callbacks=[callback])
    return callback


def schedules_with_conditions():
    """Learning rates of schedules that branch on the count of steps, against training by hand."""
    kinds = keras.optimizers.schedules
    made = {
        "warm-up": kinds.CosineDecay(0.05, BATCHES, warmup_target=0.3, warmup_steps=4),
        "restarts": kinds.CosineDecayRestarts(0.3, 4, t_mul=1.5),
    }
    found = {}
    for name, schedule in made.items():
        rates = [float(schedule(n)) for n in range(BATCHES)]
        model = perceptron(schedule)
        in_rounds(model, batches_of(*data()))
        expected, _ = by_hand([6, 4, 2, 0], "stash", rate=lambda n, rates=rates: rates[n])
        constant, _ = by_hand([6, 4, 2, 0], "stash")
        found[name] = [distance(model.get_weights(), expected), distance(expected, constant)]
    profiled = perceptron(made["warm-up"])
    callback = in_rounds(profiled, batches_of(*data()), costs=None, profile_steps=0)
    found["planned"] = callback.report.planned is not None
    return found


def plain_hinge(y, outputs):
    return tf.reduce_mean(tf.maximum(1.0 - (2.0 * y - 1.0) * outputs, 0.0), -1)


def losses_with_conditions():
    """Hinge, whose labels are converted on a condition."""
    x, y = data()
    labels = [(part > 0).astype(np.float32) for part in y]
    trained = []
    for loss in ("hinge", plain_hinge):
        model = perceptron()
        model.compile(keras.optimizers.SGD(0.3), loss, jit_compile=False)
        in_rounds(model, batches_of(x, labels))
        trained.append(model.get_weights())
    return {"distance": distance(*trained), "moved": distance(trained[0], perceptron().get_weights())}


# -- shapes, and what can be divided ---------------------------------------------------------------


class ByRows(keras.Sequential):
    """A train_step that needs the number of rows, as a number or as a tensor."""

    known = True

    def train_step(self, data):
        x, y = data
        count = float(int(x.shape[0])) if self.known else tf.cast(tf.shape(x)[0], tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x, training=True) - y)) / (4.0 * count)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def batches_of_one_size():
    """drop_remainder=True: rows are known when the step is traced, also where a dO is divided."""
    x, y = (np.concatenate(parts) for parts in data())
    parts = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
    costs = CostTable([tf_ooo.LayerCosts(1.0, back, 1.0) for back in (1.0, 6.0, 1.0, 1.0)])
    trained, divided = [], []
    for known in (True, False):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(width, activation="tanh") for width in (17, 12, 9, 4)]
        model = ByRows([keras.Input((20,)), *layers])
        model.compile(keras.optimizers.SGD(0.3), jit_compile=False)
        model.known = known
        callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, costs=costs, schedule="layerpipe")
        model.fit(parts, verbose=0, callbacks=[callback])
        trained.append(model.get_weights())
        divided.append(sorted(callback.report.layerpipe["divided"]))
    return {"distance": distance(*trained), "divided": divided}


class Scaled(keras.layers.Layer):
    """Its gradient is a product with each number by itself: no op of it takes whole rows."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


def transposed():
    layers = [
        keras.layers.Reshape((7, 1, 1)),
        keras.layers.Conv2DTranspose(5, (3, 1), padding="same", activation="tanh", name="first"),
        keras.layers.Conv2DTranspose(6, (3, 2), strides=(2, 1), activation="tanh", name="second"),
        keras.layers.Flatten(),
    ]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3, name="last")])


def scaled():
    layers = [keras.layers.Dense(9, activation="tanh"), Scaled(), keras.layers.Dense(8, activation="tanh")]
    return keras.Sequential([keras.Input((7,)), *layers, keras.layers.Dense(3)])


def divided_output_gradients():
    """A dO that can be divided is, as by hand; one that cannot is planned whole."""
    found = {}
    for name, (make, seconds) in {
        "transposed": (transposed, (1.0, 8.0, 1.0)),
        "scaled": (scaled, (1.0, 8.0, 1.0, 1.0)),
    }.items():
        given = (models.X, models.Y)
        model = models.made(make, models.batches(given)[0], models.LOSS)
        costs = CostTable([tf_ooo.LayerCosts(1.0, back, 1.0, weight_bytes=8) for back in seconds])
        callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, costs=costs, schedule="layerpipe")
        models.fit(model, callback, given)
        report = callback.report
        late = [report.layerpipe["delay_steps"][path_of(v)] for v in model.trainable_variables]
        expected = models.by_hand(make, given, models.LOSS, late)
        found[name] = {
            "distance": distance([v.numpy() for v in model.trainable_variables], expected),
            "delays": late,
            "divided": sorted(report.layerpipe["divided"]),
            "rows": [row["name"] for row in report.layers if "dO_high_processor" in row],
            "planned": [list(map(str, key)) for key in report.planned.parts],
            "predicted_step_s": report.predicted_step_s,
            "notes": [note for note in report.notes if "divided" in note],
        }
    return found


# -- optimizers and weights of samples -------------------------------------------------------------


def two_heads():
    """An odd model: a table that is used twice, a gate, two outputs of different sizes."""
    words = keras.Input((6,))
    table = keras.layers.Embedding(29, 8)
    x = keras.layers.Flatten()(table(words))
    gate = keras.layers.Dense(5, activation="sigmoid")(keras.layers.GlobalAveragePooling1D()(table(words)))
    x = keras.layers.Dense(5, activation="tanh")(x)
    x = keras.layers.multiply([x, gate])
    return keras.Model(words, [keras.layers.Dense(3, name="kind")(x), keras.layers.Dense(1, name="size")(x)])


def loss_of_heads(y, outputs):
    return models.LOSS(y[0], outputs[0]) + 0.5 * tf.reduce_mean(tf.square(y[1] - outputs[1]))


def late_with(make, given, loss, optimizer, delays):
    """As ``models.by_hand``, with updates by an optimizer."""
    model = models.made(make, models.batches(given)[0], None, optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)
    history = [[v.numpy() for v in variables]]
    for number, (x, *rest) in enumerate(models.batches(given)):
        models.assign(variables, [history[max(0, number - d)][n] for n, d in enumerate(delays)])
        with tf.GradientTape() as tape:
            value = loss(*rest, model(x, training=True))
        gradients = tape.gradient(value, [models.value_of(v) for v in variables])
        models.assign(variables, history[-1])
        compat.update(optimizer, gradients, variables)
        history.append([v.numpy() for v in variables])
    return history[-1]


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.05),
}


def optimizers_with_state():
    """Momentum, Adam and weight decay on late gradients are what the optimizer makes of them by hand."""
    sizes = np.linspace(-1, 1, len(models.X)).astype("float32")[:, None]
    given = (models.WORDS, (models.Y, sizes))
    found = {}
    for name, make in OPTIMIZERS.items():
        model = models.made(two_heads, models.batches(given)[0], None, make())
        losses = [models.LOSS, "mse"]
        model.compile(model.optimizer, losses, loss_weights=[1.0, 0.5], jit_compile=False)
        callback = models.spread(3, 5, schedule="pipedream")
        models.fit(model, callback, given)
        delays = callback.report.layerpipe["delay_steps"]
        late = [delays[path_of(v)] for v in model.trainable_variables]
        got = [v.numpy() for v in model.trainable_variables]
        ways = (late_with(two_heads, given, loss_of_heads, make(), some) for some in (late, [0] * len(late)))
        found[name] = {"late": max(late), "distances": [distance(got, expected) for expected in ways]}
    return found


def weights_of_samples():
    """Rows with a weight of their own, against training by hand."""
    weights = np.linspace(0.1, 3.0, len(models.X)).astype("float32")

    def weighted(y, weight, outputs):
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=outputs)
        return tf.reduce_mean(each * weight)

    given = (models.X, models.Y, weights)
    model = models.made(models.mlp, models.batches(given)[0], models.LOSS)
    callback = models.spread(3, 4, schedule="pipedream")
    models.fit(model, callback, given)
    delays = callback.report.layerpipe["delay_steps"]
    late = [delays[path_of(v)] for v in model.trainable_variables]
    got = [v.numpy() for v in model.trainable_variables]
    optimizer = keras.optimizers.SGD(models.RATE)
    expected = late_with(models.mlp, given, weighted, optimizer, late)
    return {"distance": distance(got, expected), "late": max(late)}


def sparse_batches():
    """Rows in a sparse tensor, whose shape has two numbers."""
    rng = np.random.default_rng(0)
    dense = (rng.normal(size=(40, 9)) * (rng.random((40, 9)) < 0.4)).astype("float32")
    y = rng.normal(size=(40, 2)).astype("float32")
    trained = []
    for sparse in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((9,), sparse=sparse)
        hidden = keras.layers.Dense(7, activation="tanh")(inputs)
        hidden = keras.layers.Dense(4, activation="tanh")(hidden)
        model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        x = tf.sparse.from_dense(dense) if sparse else dense
        parts = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, costs=costs_of(3), schedule="pipedream")
        model.fit(parts, verbose=0, callbacks=[callback])
        trained.append(model.get_weights())
    return {"distance": distance(*trained)}


if __name__ == "__main__":
    print_found(globals(), sys.argv[1:], devices=4)
