"""Run by test_layerpipe_more.py in a process of its own: logical CPUs must be set up first.

``python layerpipe_more.py CHECK...`` prints one line of JSON: what each check found.
"""

from __future__ import annotations

import os
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tests.graph.layerpipe_fit import (
    Saves,
    compiled,
    convnet,
    data,
    fitted,
    layerpipe,
    lstm,
    message,
    same,
    shortcuts,
)
from tests.graph.layerpipe_steps import batches_of, in_rounds
from tests.scripts import print_found
from tf_ooo.costs.table import CostTable
from tf_ooo.pipeline import fit as pipeline_fit

# -- a fit that goes on ----------------------------------------------------------------------------


class SavesEpoch(keras.callbacks.Callback):
    """Saves the model at the end of the first epoch."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_epoch_end(self, epoch, logs=None):
        if not epoch:
            self.model.save(self.file)


# With these two devices share the layers between a block's convolution and its shortcut's, which graph
# optimizers number otherwise than the trace.
SECONDS = (1, 1, 1, 1, 1, 1, 2, 3, 1, 1, 1, 1, 1)


def resumed_with_its_costs():
    """From the end of the first epoch and a file of costs: the plan and the bits of the fit that went on."""
    real = pipeline_fit.measured_costs

    def made_up(step, profile):
        found = real(step, profile)
        layers = [
            tf_ooo.LayerCosts(s, s, s, inputs=layer.inputs, name=layer.name, output_bytes=layer.output_bytes)
            for s, layer in zip(SECONDS, found.layers, strict=True)
        ]
        return CostTable(layers, op_seconds=found.op_seconds)

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.keras")
        whole = shortcuts()
        first = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, schedule="pipedream", profile_steps=0)
        with mock.patch.object(pipeline_fit, "measured_costs", made_up):
            fitted(whole, first, 2, more=[SavesEpoch(file)])
        resumed = keras.models.load_model(file)
        costs = CostTable.load(first.report.costs.save(os.path.join(folder, "costs.json")))
    before = resumed.get_weights()
    second = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, schedule="pipedream", costs=costs)
    with mock.patch.object(pipeline_fit, "link_between", side_effect=AssertionError("measured again")):
        fitted(resumed, second, 2, initial_epoch=1)
    rows = [[(row["name"], row["delay_steps"]) for row in one.report.layers] for one in (first, second)]
    return {
        "link_s": [one.report.costs.link.latency_s for one in (first, second)],
        "rows": rows[0] == rows[1],
        "plans": first.report.planned.to_text() == second.report.planned.to_text(),
        "equal": same(whole.get_weights(), resumed.get_weights()),
        "moved": not same(before, resumed.get_weights()),
    }


def saved_ahead():
    """Which fits say that a model that is saved in an epoch has updates of batches ahead."""

    class Writes(Saves):
        def take(self):
            with tempfile.TemporaryDirectory() as folder:
                self.model.save_weights(os.path.join(folder, "model.weights.h5"))

    found = {}
    for name, options in {"ahead": {}, "drained": {"drain_steps": 2}}.items():
        callback = layerpipe(**options)
        fitted(convnet(), callback, 1, more=[Writes(2)])
        found[name] = [note for note in callback.report.notes if "within an epoch" in note]
    callback = layerpipe()
    fitted(convnet(), callback, 1, more=[Writes(5)])
    found["at the end"] = [note for note in callback.report.notes if "within an epoch" in note]
    return found


def best_weights():
    """EarlyStopping puts back the weights of an epoch's end: those of a fit that ends there."""
    stops = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    stopped, short = convnet("adam", dropout=0.0), convnet("adam", dropout=0.0)
    epochs = len(fitted(stopped, layerpipe(), 4, more=[stops])["loss"])
    fitted(short, layerpipe(), 1)
    return {"epochs": epochs, "equal": same(stopped.get_weights(), short.get_weights())}


# -- refusals --------------------------------------------------------------------------------------


class Gated(keras.layers.Layer):
    """A condition on what weights have computed."""

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: 2.0 * x, lambda: x)


class Adversary(keras.Sequential):
    """Updates the upper half, then reads it again."""

    def train_step(self, data):
        x, y = data
        low, high = self.trainable_variables[:4], self.trainable_variables[4:]
        for optimizer, variables in ((self.optimizer, high), (self.second, low)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


class ByHand(keras.Sequential):
    """Updates its weights without an optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        variables = self.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign(variable - 0.1 * gradient)
        return {"loss": loss}


def of_kind(kind):
    model = kind([keras.Input((20,)), *(keras.layers.Dense(w) for w in (17, 12, 9, 4))])
    model.second = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.second.build(model.trainable_variables[:4])
    return model


def custom_steps_are_refused():
    """With and without costs."""
    found = {}
    for kind in (Adversary, ByHand):
        for way, options in {"costs": {}, "profiled": {"costs": None, "profile_steps": 1}}.items():
            model = of_kind(kind)
            text = message(lambda m=model, o=options: in_rounds(m, batches_of(*data()), **o))
            found[f"{kind.__name__}, {way}"] = text
    return found


def refused_before_the_first_step():
    """On the path that would measure first: the error, and how many steps had trained."""
    falling = keras.optimizers.schedules.CosineDecay(0.1, 100)
    layers = [keras.layers.Flatten(), keras.layers.Dense(5), Gated(), keras.layers.Dense(2)]
    gated = keras.Sequential([keras.Input((12, 12, 2)), *layers])
    gated.compile("sgd", convnet().loss, jit_compile=False)
    cases = {
        "global_clipnorm": (convnet(keras.optimizers.SGD(0.1, global_clipnorm=1.0)), {}),
        "schedule": (convnet(keras.optimizers.SGD(falling)), {"rate_warmup_steps": 5}),
        "scaled": (compiled("mixed_float16"), {}),
        "gated": (gated, {}),
    }
    found = {}
    for name, (model, options) in cases.items():
        before = model.get_weights()
        callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, profile_steps=1, **options)
        text = message(lambda m=model, c=callback: fitted(m, c, 1))
        found[name] = [text, same(before, model.get_weights())]
    loop, before = lstm(), lstm().get_weights()
    x, y = np.ones((32, 6, 4), np.float32), np.ones((32, 2), np.float32)
    callback = tf_ooo.OOOBackprop(mode="layerpipe", devices=2, profile_steps=1)
    text = message(lambda: loop.fit(x, y, batch_size=8, verbose=0, callbacks=[callback]))
    return found | {"loop": [text, same(before, loop.get_weights())]}


if __name__ == "__main__":
    print_found(globals(), sys.argv[1:], devices=4)
