"""A new Keras may break what fit, evaluate and predict call."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import X, Y, dense_model
from tests.zoo import KERAS_3, keras, needs_keras_3
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
    assert not train_function.is_compiled(model)
    model.jit_compile = True
    assert train_function.is_compiled(model)
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


def test_is_iterator():
    data = tf.data.Dataset.range(3)
    assert train_function.is_iterator(iter(data))
    assert not train_function.is_iterator(data)
    assert not train_function.is_iterator(iter([1]))


def test_take():
    iterator = iter(tf.data.Dataset.range(3))
    assert [int(value) for value in train_function.take(iterator, 2)] == [0, 1]
    assert [int(value) for value in train_function.take(iterator, 2)] == [2], "take lost an element"


def test_iterator_over():
    data = tf.data.Dataset.from_tensor_slices(np.arange(7.0)).batch(4)
    iterator = iter(data)
    total = tf.function(lambda it: tf.reduce_sum(next(it)))
    again = train_function.iterator_over(train_function.take(iterator, 2), iterator)
    assert [float(total(again)), float(total(again))] == [6.0, 15.0]
    total(iter(data))
    assert total.experimental_get_tracing_count() == 1, "the first batch would run in a trace of its own"


def given_to(model, kind, call):
    """Return what Keras calls its test or predict function with."""
    given, make = [], getattr(model, f"make_{kind}_function")

    def noting(*args, **kwargs):
        make(*args, **kwargs)
        function = getattr(model, f"{kind}_function")

        def note(data):
            given.append(data)
            return function(data)

        setattr(model, f"{kind}_function", note)
        return note

    object.__setattr__(model, f"make_{kind}_function", noting)
    call()
    object.__delattr__(model, f"make_{kind}_function")
    return given


def test_evaluation_on_data():
    """The numbers of evaluate and predict; Keras 2 counts the batch."""
    model = dense_model("sgd")
    data = (tf.constant(X), tf.constant(Y))
    expected = model.evaluate(X, Y, batch_size=len(X), verbose=0, return_dict=True)
    model.reset_metrics()
    before = 0 if KERAS_3 else int(model._test_counter)
    logs = tf.function(train_function.evaluation_on_data(model, "test"))(data)
    assert float(logs["loss"]) == expected["loss"]
    if not KERAS_3:
        assert int(model._test_counter) == before + 1
    predicted = tf.function(train_function.evaluation_on_data(model, "predict"))((data[0],))
    np.testing.assert_array_equal(predicted, model.predict(X, batch_size=len(X), verbose=0))


@needs_keras_3
def test_why_not_of_outputs():
    class Own(keras.Sequential):
        def test_step(self, data):
            return super().test_step(data)

    assert train_function.why_not_of_outputs(dense_model("sgd")) == ""
    assert train_function.why_not_of_outputs(Own()) == "Own has a test_step of its own"


def traced_outputs(model, x):
    """Return what goes with the outputs, and these."""
    noted = []
    outputs = tf.function(train_function.outputs_on_data(model, noted))((tf.constant(x),))
    return noted, outputs


@needs_keras_3
def test_outputs_on_data():
    model = dense_model("sgd")
    noted, outputs = traced_outputs(model, X)
    assert noted == []
    np.testing.assert_array_equal(outputs, model.predict(X, batch_size=len(X), verbose=0))
    masking = keras.Sequential([keras.Input((3, 1)), keras.layers.Masking()])
    assert traced_outputs(masking, np.ones((2, 3, 1), "float32"))[0] == [
        "masks go with the model's outputs"
    ], "Keras keeps masks elsewhere: they would be missing in the loss"
    adding = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activity_regularizer="l2")])
    (said,) = traced_outputs(adding, np.ones((2, 3), "float32"))[0]
    assert said.startswith("the model adds losses")


@needs_keras_3
def test_rest_of_test_step():
    """The loss of outputs that are given, whatever the model would have computed."""
    model = dense_model("sgd")
    data = (tf.constant(X), tf.constant(Y))
    rest = tf.function(train_function.rest_of_test_step(model))
    _, outputs = traced_outputs(model, X)
    expected = model.evaluate(X, Y, batch_size=len(X), verbose=0, return_dict=True)
    model.reset_metrics()
    assert {name: float(value) for name, value in rest(data, outputs).items()} == expected
    model.reset_metrics()
    assert float(rest(data, outputs + 1.0)["loss"]) != expected["loss"], "the model computed its own outputs"
    assert "call" not in vars(model)


def test_batches_of():
    model = dense_model("sgd")
    given = given_to(model, "test", lambda: model.evaluate(X, Y, batch_size=5, verbose=0))
    assert tf.nest.flatten(given[0].element_spec)[0].shape.as_list() == [None, X.shape[1]]
    for kind in ("test", "predict"):
        iterator = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(5))
        batches, of_spec = train_function.batches_of(model, kind, iterator)
        assert len(batches) == 1
        assert of_spec == iterator.element_spec
    predicted = given_to(model, "predict", lambda: model.predict(X, batch_size=4, verbose=0))
    batches, of_spec = train_function.batches_of(model, "predict", predicted[0])
    assert (of_spec is None) == KERAS_3
    assert not KERAS_3 or len(tf.nest.flatten(batches)[0]) == 4


@needs_keras_3
def test_batches_on_a_batch():
    model = dense_model("sgd")
    given = given_to(model, "test", lambda: model.test_on_batch(X, Y))
    batches, spec = train_function.batches_of(model, "test", given[0])
    assert (batches, spec) == ([], None), "it has been taken: no iterator of tf.data"
    given = given_to(model, "predict", lambda: model.predict_on_batch(X))
    batches, spec = train_function.batches_of(model, "predict", given[0])
    assert spec is None
    np.testing.assert_array_equal(tf.nest.flatten(batches)[0], X)


@pytest.mark.parametrize("kind", ["test", "predict"])
def test_given_again(kind):
    """Keras' function does not see that the batches were taken."""
    model = dense_model("sgd")
    getattr(model, f"make_{kind}_function")()
    function, results = getattr(model, f"{kind}_function"), []
    for taken in (False, True):
        if kind == "predict" and KERAS_3:
            given = [(tf.constant(X),)]
        else:
            given = iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(len(X)))
        model.reset_metrics()
        if taken:
            given = train_function.given_again(given, train_function.batches_of(model, kind, given)[0])
        results.append(tf.nest.flatten(function(given)))
    for stock, again in zip(*results, strict=True):
        np.testing.assert_array_equal(stock, again)


def test_joined():
    ragged, sparse = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 1], [2, 0]])
    outputs = {"a": tf.ones((2, 3)), "b": [tf.constant(1.0)]}
    assert train_function.joined([outputs]) is outputs
    joined = train_function.joined([outputs, {"a": tf.zeros((1, 3)), "b": [tf.constant(2.0)]}])
    assert joined["a"].shape == (3, 3)
    np.testing.assert_array_equal(joined["b"][0], [1.0, 2.0])
    assert train_function.joined([ragged, ragged]).nrows() == 4
    assert train_function.joined([sparse, sparse]).shape == (4, 2)


def test_makes_its_own():
    class Own(keras.Sequential):
        def make_test_function(self, force=False):
            return super().make_test_function(force)

    assert train_function.makes_its_own(Own(), "test")
    assert not train_function.makes_its_own(Own(), "predict")
    assert not train_function.makes_its_own(dense_model(), "test")
