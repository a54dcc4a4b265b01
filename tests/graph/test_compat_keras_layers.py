"""Layers of a model: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.graph.compat_models import dense_model, normalized_model
from tests.zoo import KERAS_3, keras
from tf_ooo.compat import keras_layers


def test_parts_of():
    inner = normalized_model()
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2)])
    parts = keras_layers.parts_of(model)
    assert parts[0] is model
    for part in (inner, *inner.layers[-2:], model.layers[-1]):
        assert any(part is other for other in parts), "Model._flatten_layers no longer goes into models"
    assert [id(part) for part in keras_layers.parts_of(model, itself=False)] == [id(p) for p in parts[1:]]
    assert all(map(keras_layers.is_layer, parts))
    assert not keras_layers.is_layer(inner.optimizer)


def test_is_kerass_own():
    class Own(keras.layers.Dense):
        pass

    assert keras_layers.is_kerass_own(keras.layers.Dense(2))
    assert not keras_layers.is_kerass_own(Own(2)), "get_config of the user's own layer need not say all"


def test_layers_that_depend_on_a_batch():
    (title,) = keras_layers.batch_normalizations(normalized_model())
    assert title.split("/")[-1].startswith("batch_norm")
    lstm = keras.layers.LSTM(2, stateful=True, name="keeps")
    model = keras.Sequential(
        [keras.Input((3, 4), batch_size=2), keras.layers.LSTM(3, return_sequences=True), lstm]
    )
    assert [title.split("/")[-1] for title in keras_layers.stateful_layers(model)] == ["keeps"]
    assert keras_layers.recurrent(model) == model.layers
    assert keras_layers.title_of(lstm).endswith("keeps")
    assert keras_layers.batch_normalizations(model) == []


def test_models_of_a_strategy():
    assert not keras_layers.made_in_strategy(normalized_model())
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        inside = normalized_model()
    assert keras_layers.made_in_strategy(inside)


def test_what_layers_have_learned_from_data():
    def sums(values, words):
        normalization, looked_up = keras.layers.Normalization(), keras.layers.StringLookup(vocabulary=words)
        normalization.adapt(tf.constant(values))
        return keras_layers.learned_from_data(normalization), keras_layers.learned_from_data(looked_up)

    first = sums([[1.0], [3.0]], ["a", "b"])
    assert first == sums([[1.0], [3.0]], ["a", "b"])
    other = sums([[1.0], [4.0]], ["b", "a"])
    assert first[0] != other[0], "a Normalization no longer tells its statistics"
    assert first[1] != other[1], "a lookup no longer tells its vocabulary"
    assert keras_layers.learned_from_data(keras.layers.Dense(3)) == {}


def test_unsynchronized():
    layers = [
        keras.layers.BatchNormalization(),
        keras.layers.BatchNormalization(synchronized=True, name="sync"),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    assert [title.split("/")[-1] for title in keras_layers.unsynchronized(model)] == ["sync"]


def test_inference_only():
    """Layers follow it also where they are told to train."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    )
    x = tf.constant([[1.0, 2.0, 3.0], [3.0, 5.0, 9.0]])
    calls = [vars(layer).get("call") for layer in model.layers]
    with keras_layers.inference_only(model):
        inside = model(x, training=True)
    tf.debugging.assert_equal(inside, model(x, training=False), message="Layer.call is no longer looked up")
    assert [vars(layer).get("call") for layer in model.layers] == calls
    assert not bool(tf.reduce_all(model(x, training=True) == inside))


def test_moving_averages():
    """Keras 2's fused layer keeps a corrected variance."""
    layers = keras.layers
    images = keras.Sequential([keras.Input((4, 4, 3)), layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(momentum=0.7)])
    ((mean, variance, momentum),) = keras_layers.moving_averages(model)
    assert mean is model.layers[-1].moving_mean
    assert variance is model.layers[-1].moving_variance
    assert momentum == 0.7
    assert len(keras_layers.moving_averages(images)) == KERAS_3


def test_normalizing_in_training():
    """Not those that are frozen, nor with Keras 2 those of a model that is called as in inference."""
    layers = keras.layers
    base = keras.Sequential([keras.Input((3,)), layers.Dense(3), layers.BatchNormalization(name="inner")])
    inputs = keras.Input((3,))

    def names(training):
        outputs = layers.BatchNormalization(name="own")(base(inputs, **training))
        model = keras.Model(inputs, outputs)
        titles = keras_layers.normalizing_in_training(model)
        model.layers[-1].trainable = False
        frozen = keras_layers.normalizing_in_training(model)
        assert [title for title in titles if title not in frozen] == [keras_layers.title_of(model.layers[-1])]
        model.compile("sgd", "mse")
        model.fit(np.eye(3), np.eye(3), verbose=0)
        moved = [layer.name for layer in (base.layers[-1],) if np.any(layer.moving_mean)]
        return [title.split("/")[-1] for title in titles], moved

    inner = ["inner"] if KERAS_3 else []
    assert names({"training": False}) == ([*inner, "own"], inner), "fit asks its layers for another thing"
    assert names({}) == (["inner", "own"], ["inner"])


def test_computes_in_half():
    layers = keras.layers
    for policy, half in (("mixed_bfloat16", True), ("float16", True), ("float32", False)):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype=policy)])
        assert keras_layers.computes_in_half(model) is half, "a layer no longer says what it computes in"


def test_random_layers():
    layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1), keras.layers.Dropout(0.0)]
    titles = keras_layers.random_layers(keras.Sequential([keras.Input((3,)), *layers]))
    assert len(titles) == 2
    assert "dropout" in titles[0]


def test_is_of_kerass_family():
    class Own(keras.layers.Dense):
        pass

    assert keras_layers.is_of_kerass_family(keras.layers.Dense(2))
    assert not keras_layers.is_of_kerass_family(Own(2))


def test_is_wholly_built():
    inside = keras.layers.Dense(2)
    model = keras.Sequential([inside])
    assert not keras_layers.is_wholly_built(model)
    model.build((None, 3))
    assert keras_layers.is_wholly_built(model)
    inside.built = False
    assert not keras_layers.is_wholly_built(model)


def test_evaluate_makes_its_function_by_a_method_that_can_be_wrapped():
    model, calls = normalized_model(), []
    make = model.make_test_function
    keras_layers.set_on(model, "make_test_function", lambda: calls.append(1) or make())
    model.evaluate(np.ones((2, 3)), np.ones((2, 4)), verbose=0)
    keras_layers.set_on(model, "make_test_function", None)
    assert calls == [1]
    assert "make_test_function" not in vars(model)


def test_attributes_are_shadowed_in_turns():
    model = dense_model()
    own, tracked = model.train_step, len(model.layers)
    for value in (1, keras.layers.Dense(2)):
        keras_layers.shadow(model, "train_step", value)
        assert model.train_step is value
    assert len(model.layers) == tracked, "Keras tracks what is only shadowed"
    keras_layers.unshadow(model, "train_step")
    assert model.train_step == 1
    with keras_layers.shadowed(model, "train_step", 2):
        assert model.train_step == 2
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
