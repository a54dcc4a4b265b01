"""A small model to be trained over a cluster, its data and made-up costs."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import tensorflow as tf

import tf_ooo
from tf_ooo.compat import keras_variables
from tf_ooo.costs.layer_costs import Link
from tf_ooo.costs.table import CostTable

BATCHES, ROWS, WIDTH, MICROBATCHES = 4, 12, 11, 3
# With costs and a link nothing is measured, and the plan is always the same.
COSTS = CostTable([tf_ooo.LayerCosts(1.0, 1.0, 1.0) for _ in range(4)], Link(1e-3, 1e9))


def perceptron(loss="mse", optimizer=None):
    """Its steps are traced in half the time that Adam's take, unless an optimizer is given."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((9,)), *(keras.layers.Dense(WIDTH, "tanh") for _ in range(4))])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    return model


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES * ROWS, 9)).astype("float32")
    return x, random.normal(size=(BATCHES * ROWS, WIDTH)).astype("float32")


def pipeline(cluster, **options):
    wanted = {"mode": "pipeline", "microbatches": MICROBATCHES, "schedule": "fast_forward", "costs": COSTS}
    return tf_ooo.OOOBackprop(devices=cluster, **(wanted | options))


def train(model, callbacks, epochs=2, **options):
    x, y = data()
    settings = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "epochs": epochs}
    return model.fit(x, y, callbacks=callbacks, **(settings | options))


def loss_that_calls(function=lambda: None):
    """A mean square that calls Python in the middle of each micro-batch, between its two passes."""

    def call(output):
        function()
        return np.float32(output.size > 0)

    def loss_with_python(truth, output):
        one = tf.ensure_shape(tf.numpy_function(call, [output], tf.float32), ())
        return tf.reduce_mean(tf.square(tf.cast(truth, output.dtype) - output)) * one

    return loss_with_python


def calls_within_step(number, micro_batch, function):
    """A loss and a callback that call the function in one step, between the two passes of one micro-batch.

    The step and the micro-batch are counted from 1, the micro-batch from the step's begin: what compares a
    batch with its micro-batches calls the loss as well, before the steps 1, 2, 4 and 8.
    """
    calls, steps = Counter(), []

    def call():
        calls[len(steps)] += 1
        if len(steps) == number and calls[number] == micro_batch:
            function()

    begins = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch))
    return loss_that_calls(call), begins


def hosts_of(model):
    """Return where its variables are: ``localhost`` is this process."""
    devices = [
        keras_variables.value_of(variable).device
        for variable in (*model.variables, *optimizer_variables(model))
    ]
    return sorted({device.split("/")[1].removeprefix("job:") for device in devices})


def optimizer_variables(model):
    from tf_ooo.compat import keras_compiled

    return keras_compiled.state_of(model.optimizer)


def devices_of(callback):
    """Return the devices of the plan's stages."""
    return [stage["device"] for stage in callback.report.pipeline["stages"]]
