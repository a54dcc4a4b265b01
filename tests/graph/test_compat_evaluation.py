"""A new Keras may break these: evaluate and predict call something for each batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import X, Y, dense_model
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.compat import train_function


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


def test_step_on_data():
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
