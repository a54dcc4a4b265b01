"""Keras variables: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import dense_model, normalized_model
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.compat import keras_compiled, keras_variables, tf_functions

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def test_a_variable_s_copy_is_known_to_the_optimizer():
    made = normalized_model()
    keras_compiled.build_optimizer(made.optimizer, made.trainable_variables)
    kernel = made.trainable_variables[0]
    old = keras_variables.value_of(kernel)
    keras_variables.set_value_of(kernel, keras_variables.copy_on("/device:CPU:0", old))
    assert keras_variables.value_of(kernel) is not old
    assert np.array_equal(kernel.numpy(), old.numpy())
    keras_compiled.update(
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


def test_reads_on_own_device():
    """Also in a branch, which is a graph of its own."""
    weight = tf.Variable([1.0, 2.0])

    def product():
        return weight * weight

    @tf.function
    def step():
        total = weight + 1.0
        with keras_variables.reads_on_own_device():
            branch = tf.cond(total[0] > 5.0, product, product)
            difference = weight - product()
        return total, difference, branch

    graph_def = step.get_concrete_function().graph.as_graph_def()
    nodes = [*graph_def.node, *(node for each in graph_def.library.function for node in each.node_def)]
    types = {node.name: node.op for node in nodes}
    inputs = [
        (node.op, types[name.split(":")[0]])
        for node in nodes
        if node.op in ("Mul", "Sub", "AddV2")
        for name in node.input
        if types.get(name.split(":")[0], "Const") != "Const"
    ]
    read, passed_on = "ReadVariableOp", "PlaceholderWithDefault"
    assert ("Sub", passed_on) in inputs
    assert ("AddV2", read) in inputs
    assert inputs.count(("Mul", passed_on)) == 3 * 2, (
        "BaseResourceVariable._read_variable_op: bits of an update depend on its variable's device"
    )
    assert ("Mul", read) not in inputs
    assert ("Sub", read) not in inputs
    assert [values.numpy().tolist() for values in step()] == [[2.0, 3.0], [0.0, -2.0], [1.0, 4.0]]


@pytest.mark.parametrize(
    ("name", "sign", "result"), [("assign", 0, 2.0), ("assign_add", 1, 3.0), ("assign_sub", -1, -1.0)]
)
def test_intercepted(name, sign, result):
    """Taken is the first of two assignments; what is read behind it is what was taken."""
    variable, taken = tf.Variable(1.0), []

    def take(of, value, added):
        taken.append((of is variable, added, value))
        return len(taken) == 1

    def step():
        with keras_variables.intercepted(lambda of: taken[-1][2] * 10.0 if taken else None, take):
            getattr(variable, name)(2.0, read_value=False)
            seen = variable + 0.0
            getattr(variable, name)(2.0)
        return seen, variable + 0.0

    seen, left = tf.function(step)()
    assert [each[:2] for each in taken] == [(True, sign)] * 2
    assert (float(seen), float(left), float(variable)) == (20.0, result, result)
    variable.assign_add(1.0)
    assert len(taken) == 2, "BaseResourceVariable.assign: it is intercepted for ever"
