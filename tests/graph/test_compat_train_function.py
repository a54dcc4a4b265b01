"""A new Keras may break what fit, evaluate and predict call."""

from __future__ import annotations

import types

import numpy as np
import tensorflow as tf

from tests.graph.compat_models import X, Y, dense_model
from tests.zoo import KERAS_3, keras
from tf_ooo.compat import train_function


def test_train_function_of():
    model = dense_model()
    assert model.train_function is None, "Keras makes the train function before fit now"
    function = train_function.train_function_of(model)
    assert function is model.train_function is train_function.train_function_of(model), (
        "Keras keeps its train function elsewhere: OOOBackprop would not be called"
    )


def test_new_train_function():
    model = dense_model()
    first = train_function.train_function_of(model)
    second = train_function.new_train_function(model)
    assert model.train_function is first
    assert second is not first, "make_train_function no longer makes a new function: nothing is retraced"
    logs = second(iter(tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.ones((4, 2))))))
    assert "loss" in logs, "a train function no longer takes an iterator and returns logs"


def test_new_train_function_of_another_step():
    """It is made of the wrapped step whenever it is traced; the model's own is back after each call."""
    model, calls = dense_model("sgd"), []

    def wrap(train_step):
        def step(data):
            calls.append(data)
            return train_step(data)

        return step

    function = train_function.new_train_function(model, wrap)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    assert "loss" in function(iter(data))
    traced = len(calls)
    assert traced > 0, "Keras does not trace the step that it was given"
    assert "train_step" not in vars(model)
    model.fit(X, Y, batch_size=6, verbose=0)
    assert len(calls) == traced


def test_step_on_data():
    """It does what the train function of ``fit`` does: the same weights, and Keras 2 counts the step."""
    one, two = dense_model("sgd"), dense_model("sgd")
    two.set_weights(one.get_weights())
    one.fit(X, Y, batch_size=12, verbose=0)
    logs = tf.function(train_function.step_on_data(two, two.train_step))((tf.constant(X), tf.constant(Y)))
    assert "loss" in logs
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    if not KERAS_3:
        assert int(two._train_counter) == 1, "BackupAndRestore and TensorBoard count steps by it"


def test_steps_per_execution():
    assert train_function.steps_per_execution(dense_model("adam")) == 1
    model = dense_model("adam", steps_per_execution=4)
    assert train_function.steps_per_execution(model) == 4
    seen = []
    step = model.make_train_function()
    step = step or model.train_function
    with train_function.steps_per_execution_set_to(model, 2):
        seen.append(train_function.steps_per_execution(model))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
        step(iter(data))  # two batches: in Keras 2 the end of the data would be an error
    assert seen == [4 if KERAS_3 else 2]
    assert train_function.steps_per_execution(model) == 4


def test_install_train_function():
    model, calls = dense_model(), []
    stock = train_function.train_function_of(model)

    def ours(iterator):
        calls.append(1)
        return stock(iterator)

    class Install(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            train_function.install_train_function(self.model, ours, stock)

    x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[Install()])
    assert len(calls) == 2, "fit no longer looks self.train_function up for each batch"
    model.fit(x, y, batch_size=4, verbose=0)
    assert len(calls) == 2, "fit no longer begins with make_train_function: ours stays installed"
    assert model.train_function is stock


def test_remove_train_function():
    model = dense_model()
    stock = train_function.train_function_of(model)
    train_function.install_train_function(model, print, stock)
    assert model.train_function is print
    train_function.remove_train_function(model)
    assert model.train_function is stock
    assert "make_train_function" not in vars(model), "the model's own make_train_function stays shadowed"
    train_function.remove_train_function(model)
    train_function.install_train_function(model, print, stock)
    model.train_function = max
    train_function.remove_train_function(model)
    assert model.train_function is max, "a train function set by someone else must be kept"


def test_why_not_rewritable():
    model = dense_model()
    assert train_function.why_not_rewritable(model) is None
    assert "run_eagerly" in train_function.why_not_rewritable(dense_model(run_eagerly=True))
    model.trainable = False
    assert "no trainable weights" in train_function.why_not_rewritable(model)
    adapted = keras.layers.Normalization()
    adapted.adapt(np.ones((4, 3), "float32"))
    unbuilt = keras.Sequential([adapted, keras.layers.Dense(2)])
    unbuilt.compile("sgd", "mse")
    assert unbuilt.weights
    assert train_function.why_not_rewritable(unbuilt) is None, "its Dense has weights after the first batch"


def test_functions_of():
    model = dense_model()
    model.predict(X, verbose=0)
    functions = train_function.functions_of(model)
    assert functions["predict_function"] is not None, (
        "predict keeps its function elsewhere: it would be stale"
    )
    train_function.set_functions_of(model, dict.fromkeys(functions))
    assert model.predict_function is None
    assert model.predict(X, verbose=0).shape == (12, 2), "Keras no longer makes the function anew"
    assert train_function.functions_of(model.layers[0]) == {}


def test_functions_run_eagerly():
    assert not train_function.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        assert train_function.functions_run_eagerly()
        reason = train_function.why_not_rewritable(dense_model())
        # A model of Keras 2 then says itself that it runs eagerly.
        assert reason == train_function.RUN_EAGERLY if KERAS_3 else "run_eagerly=True" in reason
    finally:
        tf.config.run_functions_eagerly(False)


def test_jit_compile(monkeypatch):
    gpu = [types.SimpleNamespace(device_type="GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: gpu)
    model = dense_model()
    assert train_function.keras_compiles_by_itself(model) is KERAS_3
    train_function.set_jit_compile(model, True)
    assert model.jit_compile is True
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [])
    assert not train_function.keras_compiles_by_itself(model)


def test_counts_steps():
    assert train_function.counts_steps(dense_model()) == (not KERAS_3), "who counts a step's ops has changed"


def test_has_kerass_train_step():
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    inputs = keras.Input((3,))
    outputs = keras.layers.Dense(1)(inputs)
    assert train_function.has_kerass_train_step(keras.Model(inputs, outputs))
    assert not train_function.has_kerass_train_step(Own(inputs, outputs))
