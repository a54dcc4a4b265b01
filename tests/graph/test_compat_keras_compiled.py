"""Optimizers, losses and metrics: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import X, Y, dense_model, normalized_model
from tests.zoo import KERAS_3, keras, loss_scaling, needs_keras_3
from tf_ooo.compat import keras_compiled, versions


def legacy():
    return keras.optimizers.legacy.Adam(0.01)


KINDS = [lambda: keras.optimizers.Adam(0.01), lambda: loss_scaling()(keras.optimizers.SGD(0.1, momentum=0.9))]


@pytest.mark.parametrize("make", KINDS if KERAS_3 else [*KINDS, legacy])
def test_optimizers(make):
    """Found, built, its state known, and what it is given can be changed."""
    model = dense_model(make())
    optimizer = model.optimizer
    assert keras_compiled.is_optimizer(optimizer)
    keras_compiled.build_optimizer(optimizer, model.trainable_variables)
    state = keras_compiled.state_of(optimizer)
    assert len(state) >= 1 + len(model.trainable_variables), "slots are missing: they would not be broadcast"
    keras_compiled.build_optimizer(optimizer, model.trainable_variables)
    assert [id(v) for v in keras_compiled.state_of(optimizer)] == [id(v) for v in state]
    given = []

    def make_update(apply):
        def update(grads, trainable_variables=None):
            given.extend(grads)
            return apply([tf.zeros_like(g) for g in grads], trainable_variables)

        return update

    before = model.get_weights()
    keras_compiled.shadow_update(optimizer, make_update)
    model.train_on_batch(X, Y)
    keras_compiled.unshadow_update(optimizer)
    assert len(given) == 2, "updates no longer go through apply or apply_gradients: nothing is averaged"
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not {"apply", "apply_gradients"} & set(vars(optimizer))


def test_inner_optimizers():
    inner = keras.optimizers.SGD(0.1)
    assert keras_compiled.inner_optimizers(inner) == []
    assert keras_compiled.inner_optimizers(loss_scaling()(inner)) == [inner]


def test_loss_scaling():
    """The method that scales a loss, and by how much; an optimizer that does not has none."""
    assert keras_compiled.loss_scaling(keras.optimizers.SGD(0.1)) == ""
    scaling = loss_scaling()(keras.optimizers.SGD(0.1))
    method = getattr(scaling, keras_compiled.loss_scaling(scaling))
    assert float(method(tf.constant(2.0))) == 2.0**16


@needs_keras_3
def test_loss_scaling_by_a_fixed_factor():
    assert keras_compiled.loss_scaling(keras.optimizers.SGD(0.1, loss_scale_factor=8.0)) == "scale_loss"


def test_plain_sgd():
    assert keras_compiled.is_plain_sgd(keras.optimizers.SGD(0.1))
    falling = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for more in ({"momentum": 0.9}, {"clipnorm": 1.0}, {"learning_rate": falling}):
        assert not keras_compiled.is_plain_sgd(keras.optimizers.SGD(**more))
    assert not keras_compiled.is_plain_sgd(keras.optimizers.Adam())


def test_plain_sgd_of_keras_2():
    older = keras if versions.is_keras_2(keras) else pytest.importorskip("tf_keras")
    for optimizers in (older.optimizers, older.optimizers.legacy):
        assert keras_compiled.is_plain_sgd(optimizers.SGD(0.1))
        assert not keras_compiled.is_plain_sgd(optimizers.SGD(0.1, momentum=0.9))
        assert not keras_compiled.is_plain_sgd(optimizers.Adam())


def test_is_built():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    assert not keras_compiled.is_built(optimizer)
    model = dense_model(optimizer)
    keras_compiled.build_optimizer(optimizer, model.trainable_variables)
    assert keras_compiled.is_built(optimizer), "slots would be made while a step is traced"


@pytest.mark.parametrize("make", KINDS)
def test_to_be_built(make):
    """These are there afterwards; nothing is there before."""
    model = dense_model(make())
    optimizer, weights = model.optimizer, model.trainable_variables
    stand_ins = keras_compiled.to_be_built(optimizer, weights)
    assert not keras_compiled.is_built(optimizer)
    if not KERAS_3 and keras_compiled.inner_optimizers(optimizer):
        assert stand_ins is None  # Keras 2 does not make its loss scaling from settings
        return
    keras_compiled.build_optimizer(optimizer, weights)
    state = keras_compiled.state_of(optimizer)
    assert sorted(tuple(v.shape) for v in stand_ins) == sorted(tuple(v.shape) for v in state)
    assert keras_compiled.to_be_built(optimizer, weights) == []


def test_not_known_what_is_to_be_built():
    class Own(keras.optimizers.SGD):
        def __init__(self, needed):
            super().__init__(needed)

    weights = dense_model().trainable_variables
    assert keras_compiled.to_be_built(Own(0.1), weights) is None


@pytest.mark.parametrize("explicit", [False, True])
def test_update(explicit):
    model = dense_model()
    keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
    before = model.get_weights()
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    given = model.trainable_variables if explicit or not KERAS_3 else None
    keras_compiled.update(model.optimizer, gradients, given)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b - np.float32(0.01))


@needs_keras_3
def test_variables_to_apply():
    model = dense_model()
    keras_compiled.build_optimizer(model.optimizer, model.trainable_variables)
    assert (
        keras_compiled.variables_to_apply(model.optimizer, model.trainable_variables[:1])
        == (model.trainable_variables[:1])
    )
    built_with = keras_compiled.variables_to_apply(model.optimizer, None)
    assert [id(v) for v in built_with] == [id(v) for v in model.trainable_variables], (
        "Optimizer._trainable_variables: gradients of apply(grads) cannot be told apart"
    )


def test_horovods_optimizer():
    """Horovod's wrapper is a class that it derives from the optimizer's."""

    class Wrapper(keras.optimizers.SGD):
        def _allreduce_grads(self, grads, variables):
            return grads

    wrapper = Wrapper(0.1)
    assert not keras_compiled.is_horovod_optimizer(wrapper)
    wrapper._agg_helper = None
    assert keras_compiled.is_horovod_optimizer(wrapper)
    assert keras_compiled.horovod_averages(wrapper) is not KERAS_3
    assert not keras_compiled.is_horovod_optimizer(keras.optimizers.SGD(0.1))


def test_summed_losses():
    model = normalized_model()
    assert keras_compiled.summed_losses(model) == []
    model.compile("adam", keras.losses.MeanSquaredError(reduction="sum"))
    assert keras_compiled.summed_losses(model) == ["mean_squared_error"]
    model.compile("adam", keras.losses.MeanSquaredError(reduction="none"))
    assert keras_compiled.summed_losses(model) == ["mean_squared_error"]


def test_masks():
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.Masking(name="mask"), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=0))
    titles = [title.split("/")[-1] for title in keras_compiled.masks(model)]
    assert titles == ["mask", "sparse_categorical_crossentropy"], "a masked loss is averaged by rows, unsaid"
    assert keras_compiled.masks(normalized_model()) == []


def test_weighted_means():
    """A number without a weight counts as its share of the batch; one with a weight keeps it."""
    model = normalized_model()
    model.evaluate(np.ones((4, 3)), np.ones((4, 4)), verbose=0)
    mean = next(metric for metric in model.metrics if type(metric) is keras.metrics.Mean)
    mean.reset_state()
    own = vars(mean).get("update_state")  # Keras 2 keeps it on the metric
    for share, value in ((0.75, 1.0), (0.25, 5.0)):
        with keras_compiled.weighted_means(model, share):
            mean.update_state(tf.constant(value))
    assert float(mean.result()) == 2.0, "Mean.update_state is no longer looked up on the metric"
    with keras_compiled.weighted_means(model, 0.5):
        mean.update_state([6.0, 6.0])
    assert float(mean.result()) == pytest.approx((0.75 + 1.25 + 12.0) / 3)
    assert vars(mean).get("update_state") is own


@needs_keras_3
def test_means_of_outputs_that_are_made_later():
    """A share of one for each batch, whatever rows are known."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in "ab"])
    model.compile("sgd", ["mse", "mse"])
    for rows in (4, 2):
        x = keras.ops.ones((rows, 3))
        with keras_compiled.weighted_means(model, 0.5):
            model.compute_loss(x=x, y=[x[:, :1], x[:, :1]], y_pred=model(x))
    counts = [float(metric.count) for metric in model._compile_loss.metrics]
    assert counts == [1.0, 1.0], "CompileLoss.metrics, build: batches count by the rows of their traces"


def test_is_kerass_own():
    class Own(keras.losses.MeanSquaredError):
        pass

    assert keras_compiled.is_kerass_own(keras.losses.MeanSquaredError())
    assert not keras_compiled.is_kerass_own(Own())
    assert not keras_compiled.is_kerass_own("mse")


def test_loss_weights():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", loss_weights=[2.0])
    assert keras_compiled.loss_weights(model) == [2.0], "compile no longer tells its loss_weights"
    model.compile("sgd", lambda y, p: p)
    assert keras_compiled.loss_weights(model) is None


def test_own_loss_code():
    """Only what is not Keras' own may depend on rows in a way that nobody knows."""

    def own(y, p):
        return tf.reduce_mean(y - p)

    class Layer(keras.layers.Layer):
        def call(self, x):
            return x

    def said(loss, *layers):
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])
        model.compile("sgd", loss)
        return keras_compiled.own_loss_code(model)

    for loss in ("mse", keras.losses.MeanSquaredError(), keras.losses.mean_squared_error):
        assert said(loss) == []
    assert said(own) == ["loss own"]
    regularized = keras.layers.Dense(2, activity_regularizer="l2", name="regularized")
    texts = said("mse", Layer(name="mine"), regularized)
    assert [text.split("/")[-1].split()[-1] for text in texts] == ["mine", "regularized"]

    class Model(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Model([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert keras_compiled.own_loss_code(model) == ["Model"]
