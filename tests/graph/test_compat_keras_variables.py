"""Keras variables: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.graph.compat_models import dense_model, normalized_model
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.compat import keras_optimizers, keras_variables, tf_functions

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def test_a_variable_s_copy_is_known_to_the_optimizer():
    made = normalized_model()
    keras_optimizers.build_optimizer(made.optimizer, made.trainable_variables)
    kernel = made.trainable_variables[0]
    old = keras_variables.value_of(kernel)
    keras_variables.set_value_of(kernel, keras_variables.copy_on("/device:CPU:0", old))
    assert keras_variables.value_of(kernel) is not old
    assert np.array_equal(kernel.numpy(), old.numpy())
    keras_optimizers.update(
        made.optimizer, [tf.ones(v.shape) for v in made.trainable_variables], made.trainable_variables
    )
    assert not np.array_equal(kernel.numpy(), old.numpy())


def test_an_emptied_variable_takes_no_memory_until_it_is_filled():
    for value in (tf.ones((3, 2)), tf.constant([[1, 2]]), tf.constant(True), tf.constant("text")):
        variable = tf.Variable(value, trainable=False)
        keras_variables.empty(variable)
        assert tf.size(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)) == 0
        keras_variables.fill(variable, value)
        assert tf.reduce_all(variable == value)


def test_a_register_takes_batches_of_any_size():
    """The shape of what was stored, not of what is being stored."""
    register = keras_variables.register("float32", (None, 3), CPU)
    assert register.shape.rank is None
    assert register.numpy().shape == (0, 3)

    def body(x):
        before = tf.ensure_shape(register.read_value(), (None, 3))
        register.assign(x, read_value=False)
        return tf.reshape(before, tf.shape(before)), tf.shape(before)[0]

    step = tf_functions.plain_function(body, [tf.TensorSpec([None, 3])])
    assert [int(step(tf.ones((rows, 3)))[1]) for rows in (4, 2, 7)] == [0, 4, 2]
    assert keras_variables.register("int64", (), CPU).numpy().shape == ()


def test_zeros_on_a_device():
    zeros = keras_variables.zeros_on(CPU, tf.float32, (2, 3))
    assert not zeros.trainable
    assert zeros.device.endswith(CPU)
    np.testing.assert_array_equal(zeros.numpy(), np.zeros((2, 3), "float32"))


def test_path_of():
    kernel = dense_model().trainable_variables[0]
    assert keras_variables.path_of(kernel).removesuffix(":0").endswith("/kernel")
    assert keras_variables.path_of(tf.Variable(1.0, name="own")) == "own:0"


def test_is_overwritten_with_gradient():
    kernel = dense_model().trainable_variables[0]
    assert not keras_variables.is_overwritten_with_gradient(kernel)
    if KERAS_3:
        kernel.overwrite_with_gradient = True
        assert keras_variables.is_overwritten_with_gradient(kernel)


def test_handle_of():
    """Ops of the graph that is being traced read the handle: it is what the graph captures."""
    kernel, handles = dense_model().trainable_variables[0], []

    def step():
        handles.append(keras_variables.handle_of(kernel))
        return [tf.convert_to_tensor(kernel) + 1.0]

    concrete = tf_functions.concrete_function(step, [])
    assert id(handles[0]) in {id(outside) for outside, _ in concrete.graph.captures}
    assert keras_variables.handle_of(tf.constant(1.0)) is None


def test_a_mark_goes_on_to_copies():
    plain, marked = tf.Variable(1.0), tf.Variable(2.0)
    keras_variables.mark_in_host_memory(marked)
    copies = [keras_variables.copy_on(CPU, variable) for variable in (plain, marked)]
    assert [keras_variables.is_in_host_memory(variable) for variable in copies] == [False, True]


def test_named():
    """By their paths; a number where several have one, as layers built by a call may."""
    kernel, bias = dense_model().trainable_variables
    path = keras_variables.path_of(kernel)
    assert keras_variables.named([kernel, bias, kernel]) == {
        path: kernel,
        keras_variables.path_of(bias): bias,
        f"{path}#1": kernel,
    }


@needs_keras_3
def test_made_trainable():
    """Frozen or not."""
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    layer.trainable = False
    names = [variable.name for variable in keras_variables.made_trainable(layer)]
    assert names == ["gamma", "beta"], "Layer._trainable_variables"
    optimizer = keras.optimizers.SGD()
    optimizer.build([layer.beta])
    assert keras_variables.made_trainable(optimizer) == [layer.beta], "Optimizer._trainable_variables"


def test_unique_name_of():
    first, second = (tf.Variable(1.0, name="same") for _ in range(2))
    names = [keras_variables.unique_name_of(variable) for variable in (first, second)]
    assert len(set(names)) == 2, "Variable._unique_id: states of one name are taken for one"
    assert all(name.startswith("same") for name in names)
