"""Flags of layers and variables: what an upgrade breaks."""

from __future__ import annotations

import tensorflow as tf

from tests.zoo import keras, loss_scaling, needs_keras_3
from tf_ooo.compat import keras_trainable, tf_functions, train_function


def model_of_two():
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="second")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
    return model


def names(variables):
    return [variable.path.split("/")[-2] for variable in variables]


def traced_step(model, body):
    """The step, each call of which is in a trace of its own: steps that run eagerly keep nothing."""
    step = keras_trainable.as_first_traced(model, body)

    def trace():
        with tf.Graph().as_default():
            step()

    return trace


@needs_keras_3
def test_as_first_traced():
    model, seen = model_of_two(), []
    step = traced_step(model, lambda: seen.append(names(model.trainable_variables)))
    train_function.train_function_of(model)
    step()
    model.get_layer("first").trainable = False
    step()
    assert seen[0] == seen[1] == ["first", "first", "second", "second"], (
        "Layer._trainable, Layer._trainable_variables: a layer that is frozen after compile stops training"
    )
    assert names(model.trainable_variables) == ["second", "second"]
    assert names(keras_trainable.trained_variables(model)) == seen[0]
    eagerly = keras_trainable.as_first_traced(model, lambda: names(model.trainable_variables))
    assert eagerly() == ["second", "second"], "a step that runs eagerly is as if it were traced each time"
    model.compile("sgd", "mse")
    train_function.train_function_of(model)
    step()
    assert seen[2] == ["second", "second"]


@needs_keras_3
def test_what_a_stock_fit_has_trained():
    model = model_of_two()
    model.get_layer("first").trainable = False
    x = keras.ops.ones((4, 4))
    model.fit(x, x[:, :2], verbose=0)
    assert tf_functions.step_of_fit(model.train_function) is not None
    model.get_layer("first").trainable = True
    assert names(keras_trainable.trained_variables(model)) == ["second", "second"], (
        "Keras' train function and its captures: a layer that is thawed after stock steps trains"
    )


@needs_keras_3
def test_a_layer_of_states_alone_stays_as_it_is():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(center=False, scale=False), keras.layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    x = keras.ops.ones((4, 4))
    model.fit(x, x[:, :2], verbose=0)
    seen = []
    traced_step(model, lambda: seen.append(model.layers[0].trainable))()
    assert seen == [True]


@needs_keras_3
def test_flags_before_any_step_count():
    model = model_of_two()
    model.optimizer.build(model.trainable_variables)
    train_function.train_function_of(model)
    model.get_layer("first").trainable = False
    assert names(keras_trainable.trained_variables(model)) == ["second", "second"]


@needs_keras_3
def test_other_optimizer():
    """The model was trained by us, or by stock."""
    x = keras.ops.ones((4, 4))
    for ours in (True, False):
        model = model_of_two()
        train_function.train_function_of(model)
        if ours:
            traced_step(model, lambda: None)()
        else:
            model.fit(x, x[:, :2], verbose=0)
        assert not keras_trainable.other_optimizer(model)
        model.optimizer = keras.optimizers.SGD()
        assert keras_trainable.other_optimizer(model), (
            "what Keras' traced step writes: a new optimizer trains, where stock goes on with the old one"
        )
        model.compile("sgd", "mse")
        train_function.train_function_of(model)
        assert not keras_trainable.other_optimizer(model)


@needs_keras_3
def test_as_first_fit():
    model, seen = model_of_two(), []
    train_function.train_function_of(model)
    traced_step(model, lambda: None)()
    first, model.optimizer = model.optimizer, keras.optimizers.SGD()

    def note():
        seen.append(model.optimizer)

    def step():
        return tf.function(keras_trainable.as_first_fit(model, note, note), autograph=False)

    tf.function(lambda: step()(), autograph=False)()
    step()()
    assert seen == [first, model.optimizer], "Model.optimizer is no attribute of the model any more"
    assert model.optimizer is not first


@needs_keras_3
def test_what_a_model_remembers_is_not_saved(tmp_path):
    """A ``_Traced`` is no container, which Keras would walk through."""
    model = model_of_two()
    train_function.train_function_of(model)
    traced_step(model, lambda: None)()
    assert isinstance(vars(model)["_ooo_trainable"], keras_trainable._Traced)
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")


def test_no_other_optimizer_where_losses_are_scaled():
    """With Keras 2, too, whose optimizer does not know its weights."""
    model = model_of_two()
    model.compile(loss_scaling()(keras.optimizers.SGD(0.1)), "mse")
    assert not keras_trainable.other_optimizer(model)
