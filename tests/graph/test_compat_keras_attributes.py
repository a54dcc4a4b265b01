"""Attributes of one object: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.graph.compat_models import dense_model, normalized_model
from tests.zoo import keras
from tf_ooo.compat import keras_layers


def test_evaluate_makes_its_function_by_a_method_that_can_be_wrapped():
    made, calls = normalized_model(), []
    make = made.make_test_function
    keras_layers.set_on(made, "make_test_function", lambda: calls.append(1) or make())
    made.evaluate(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    keras_layers.set_on(made, "make_test_function", None)
    assert calls == [1]
    assert "make_test_function" not in vars(made)


def test_attributes_are_shadowed_in_turns():
    model = dense_model()
    own, tracked = model.train_step, len(model.layers)
    for value in (1, keras.layers.Dense(2)):
        keras_layers.shadow(model, "train_step", value)
        assert model.train_step is value
    assert len(model.layers) == tracked, "Keras tracks what is only shadowed"
    keras_layers.unshadow(model, "train_step")
    assert model.train_step == 1
    keras_layers.unshadow(model, "train_step")
    assert model.train_step == own
    assert "train_step" not in vars(model)


def test_attributes_of():
    layer = keras.layers.Dense(2)
    layer.inner = inner = keras.layers.Dense(3)
    assert any(value is inner for value in keras_layers.attributes_of(layer)), (
        "Keras keeps attributes elsewhere: optimizers in layers are not found"
    )


def test_named_attributes_of():
    layer = keras.layers.Layer()
    layer.counter = tf.Variable(0.0, trainable=False)
    attributes = keras_layers.named_attributes_of(layer).items()
    holders = [name for name, value in attributes if value is layer.counter or _has(value, layer.counter)]
    assert holders == ["counter"], "what a variable is called in messages is no attribute of the user's"


def _has(value, variable):
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(item is variable for item in items)
