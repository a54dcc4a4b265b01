"""An upgrade may break these: a variable stands behind a Keras variable."""

from __future__ import annotations

import tensorflow as tf

from grappler_passes.compat import keras_values
from tests.graph.compat_models import dense_model
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.compat import versions


@needs_keras_3
def test_variable_of_keras():
    variable = keras.Variable([1.0], name="v")
    assert isinstance(keras_values.variable_of_keras(variable), tf.Variable), (
        "keras.Variable._value is no longer the tf.Variable: frozen layers are not recognized"
    )
    own = tf.Variable(1.0)
    assert keras_values.variable_of_keras(own) is own


def test_path_of_keras():
    assert keras_values.path_of_keras(tf.Variable(1.0, name="v")) is None
    path = keras_values.path_of_keras(dense_model().layers[0].kernel)
    keras_2 = versions.is_keras_2(keras)
    assert path is None if keras_2 else path.endswith("/kernel"), "variables lost Keras' own names"


def test_has_gradient():
    assert keras_values.has_gradient(tf.bfloat16)
    assert keras_values.has_gradient("complex64")
    assert not keras_values.has_gradient(tf.int64), "Keras 2's counters of steps would count as weights"


@needs_keras_3
def test_set_variable_of_keras():
    variable, value = keras.Variable([1.0], name="v"), tf.Variable([2.0])
    keras_values.set_variable_of_keras(variable, value)
    assert variable.numpy() == [2.0], "keras.Variable._value is no longer what is read: nothing can be moved"


def test_optimizer_variables():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("nadam", "mse")
    model.second = keras.optimizers.SGD(momentum=0.9)
    for optimizer in (model.optimizer, model.second):
        optimizer.build(model.trainable_variables)
    if KERAS_3:
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam())
        scaled.build(model.trainable_variables)
        model.third = scaled
        product = scaled.inner_optimizer._u_product
        assert any(product is variable for variable in keras_values.optimizer_variables(model))
    names = [variable.name for variable in keras_values.optimizer_variables(model)]
    count = 2 + len(model.trainable_variables) * 3  # rates or counters aside, two moments and a momentum
    assert len(names) >= count, "optimizers of a model are no longer found: their state counts as weights"
    assert not {id(v) for v in model.variables} & {id(v) for v in keras_values.optimizer_variables(model)}
