"""Compiled steps for the tests of the XLA mode."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests import zoo

# XLA compiles the two graphs on their own and may merge other ops.  Seen on x86: 0 with momentum, 7e-8
# after ten steps of Adam on convolutions.
TOLERANCE = 1e-6
ASKED = {"schedule": "multi_stream", "any_platform": True, "profile_steps": 0, "strict": True}


def small():
    return zoo.stack(zoo.features(7), layers.Dense(5, activation="relu"), layers.Dense(4, activation="tanh"))


def step_of(model, optimizer):
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss, "count": 3, "none": None}

    return step


def plain_step(optimizer=None):
    """An MLP, a step of it, and a batch."""
    keras.utils.set_random_seed(1)
    model, x, y = small()
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    return model, step_of(model, optimizer), x, y


def assert_near(one, two):
    """Two lists of weights."""
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)


def uncompilable(rewrite):
    """The rewrite, and an op that XLA's backend fails to compile: it knows no such call."""

    def rewritten(graph_def, fetches, dump_dir):
        made = rewrite(graph_def, fetches, dump_dir)
        unknown = made.graph_def.node.add(name="unknown", op="XlaCustomCallV2", input=[made.fetches[1]])
        unknown.attr["operand_dtypes"].list.type.append(tf.float32.as_datatype_enum)
        unknown.attr["result_dtypes"].list.type.append(tf.float32.as_datatype_enum)
        unknown.attr["result_shapes"].list.shape.add()
        unknown.attr["call_target_name"].s = b"nobody_knows"
        unknown.attr["backend_config"].s = b""
        unknown.attr["has_side_effect"].b = False
        return dataclasses.replace(made, fetches=(made.fetches[0], "unknown:0"))

    return rewritten
