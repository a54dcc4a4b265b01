"""The private API that the pipeline mode uses: what breaks here when an upgrade changes it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from grappler_passes import plugin
from grappler_passes.analysis.microbatches import SUM_ATTR
from tests.zoo import keras
from tf_ooo.compat import (
    keras_attributes,
    keras_fits,
    keras_layers,
    keras_losses,
    keras_optimizers,
    keras_variables,
    op_marks,
    tf_functions,
)
from tf_ooo.tracing import variables
from tf_ooo.tracing.variables import Moved


def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    made.compile("adam", "mse")
    return made


def test_grappler_leaves_marked_sums_a_chain():
    plugin.load()
    seen = []
    request = plugin.register(plugin.Request("sums", rewrite=seen.append))
    weight = tf.Variable(np.ones((5, 5), "float32"))

    @tf.function
    def step(x):
        total = None
        for part in tf.split(x, 4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(part @ weight))
            gradient = tape.gradient(loss, weight)
            with op_marks.marked_sums():
                total = gradient if total is None else total + gradient
        weight.assign_sub(0.1 * total)

    try:
        with plugin.tracing(request):
            step(tf.ones((8, 5)))
    finally:
        plugin.unregister("sums")
    sums = [node for node in seen[-1].node if SUM_ATTR in node.attr]
    assert [node.op for node in sums].count("AddV2") == 3
    assert not any(node.op == "AddN" for node in seen[-1].node)


def test_a_variable_s_copy_is_known_to_the_optimizer():
    made = model()
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


def test_functions_are_put_away_and_come_back():
    made = model()
    made.predict(np.ones((2, 3)), verbose=0)
    function = made.predict_function
    moved = Moved(made)
    moved.move({}, [])
    assert made.predict_function is None
    assert moved.restore() == []
    assert made.predict_function is function


def test_moved_variables_come_back_with_their_new_values():
    made = model()
    kernel = made.trainable_variables[0]
    old = keras_variables.value_of(kernel)
    moved = Moved(made)
    moved.move({id(kernel): "/job:localhost/replica:0/task:0/device:CPU:00"}, made.variables)
    away = keras_variables.value_of(kernel)
    assert away is not old
    kernel.assign(np.full((3, 4), 7.0))
    moved.restore()
    assert keras_variables.value_of(kernel) is old
    assert (old.numpy() == 7).all()
    assert away.numpy().size == 0  # its memory is free: graphs may keep the variable


def test_who_interrupts_variables_on_their_way_back_may_go_on(monkeypatch):
    made = model()
    weights = made.trainable_variables
    old = [keras_variables.value_of(v) for v in weights]
    moved, device = Moved(made), "/job:localhost/replica:0/task:0/device:CPU:00"
    moved.move({id(v): device for v in weights}, weights)
    for variable in weights:
        variable.assign(np.full(variable.shape, 7.0))
    take, seen = variables._taken, []

    def interrupted(*args):
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(variables, "_taken", interrupted)
    with pytest.raises(KeyboardInterrupt):
        moved.restore()
    assert all((v.numpy() == 7).all() for v in weights)
    assert moved.restore() == []
    assert all((v.numpy() == 7).all() for v in weights)
    assert all(keras_variables.value_of(v) is one for v, one in zip(weights, old, strict=True))


def test_what_is_said_about_layers_and_losses():
    made = model()
    assert [
        path.split("/")[-1].startswith("batch_norm") for path in keras_layers.batch_normalizations(made)
    ] == [True]
    assert keras_losses.summed_losses(made) == []
    made.compile("adam", keras.losses.MeanSquaredError(reduction="sum"))
    assert keras_losses.summed_losses(made) == ["mean_squared_error"]


def test_the_callback_list_that_calls_is_found():
    found = []
    seen = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: found.append(keras_fits.running_callback_list())
    )
    mine = keras.callbacks.CallbackList([seen], model=model())
    mine.on_train_begin()
    assert found == [mine]
    assert keras_fits.running_callback_list() is None


def test_what_gives_a_fit_its_batches_is_found():
    """Its ``with`` is entered once an epoch, and once for each batch in some versions."""
    found, entered = [], []

    def wrap(logs):
        batches = keras_fits.running_batches()
        found.append(batches)
        original = batches.catch_stop_iteration
        batches.catch_stop_iteration = lambda: entered.append(1) or original()

    made = model()
    made.compile("sgd", "mse")
    made.fit(
        np.ones((4, 3)),
        np.ones((4, 4)),
        verbose=0,
        epochs=2,
        callbacks=[keras.callbacks.LambdaCallback(on_train_begin=wrap)],
    )
    assert hasattr(found[0], "catch_stop_iteration")
    assert len(entered) >= 2
    assert keras_fits.running_batches() is None


def test_evaluate_makes_its_function_by_a_method_that_can_be_wrapped():
    made, calls = model(), []
    make = made.make_test_function
    keras_attributes.set_on(made, "make_test_function", lambda: calls.append(1) or make())
    made.evaluate(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    keras_attributes.set_on(made, "make_test_function", None)
    assert calls == [1]
    assert "make_test_function" not in vars(made)


def test_an_emptied_variable_takes_no_memory():
    for value in (tf.ones((3, 2)), tf.constant([[1, 2]]), tf.constant(True), tf.constant("text")):
        variable = tf.Variable(value, trainable=False)
        keras_variables.empty(variable)
        assert tf.size(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)) == 0


def test_decorated_methods_are_traced_anew():
    class Owner:
        @tf.function
        def read(self):
            return self.weight.read_value()

    one, other = Owner(), Owner()
    for owner in (one, other):
        owner.weight = tf.Variable(1.0)
        assert owner.read() == 1.0
        owner.weight = tf.Variable(2.0)
    tf_functions.forget_traces(one)
    assert one.read() == 2.0
    assert other.read() == 1.0  # as TensorFlow has it


def test_what_tf_function_was_given():
    class Owner:
        factor = 3.0

        @tf.function
        def scaled(self, x):
            if tf.reduce_sum(x) > 0.0:
                x = x * self.factor
            return x

    owner = Owner()
    inlined = tf_functions.undecorated(owner.scaled)
    tf_functions.forget_traces(owner)
    traced = tf.function(lambda x: inlined(x), autograph=False)
    assert traced(tf.constant(2.0)) == 6.0
    assert traced(tf.constant(-2.0)) == -2.0
    assert not [op for op in traced.get_concrete_function(tf.constant(2.0)).graph.get_operations()
                if op.type.endswith("PartitionedCall")]  # fmt: skip
    assert tf_functions.undecorated(len) is len


def test_models_of_a_strategy():
    assert not keras_layers.made_in_strategy(model())
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        inside = model()
    assert keras_layers.made_in_strategy(inside)
