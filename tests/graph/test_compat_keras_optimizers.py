"""Optimizers: what a new Keras breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.graph.compat_models import X, Y, dense_model
from tests.zoo import KERAS_3, keras, loss_scaling, needs_keras_3
from tf_ooo.compat import keras_optimizers, versions


def legacy():
    return keras.optimizers.legacy.Adam(0.01)


KINDS = [lambda: keras.optimizers.Adam(0.01), lambda: loss_scaling()(keras.optimizers.SGD(0.1, momentum=0.9))]


@pytest.mark.parametrize("make", KINDS if KERAS_3 else [*KINDS, legacy])
def test_optimizers(make):
    """Found, built, its state known, and what it is given can be changed."""
    model = dense_model(make())
    optimizer = model.optimizer
    assert keras_optimizers.is_optimizer(optimizer)
    keras_optimizers.build_optimizer(optimizer, model.trainable_variables)
    state = keras_optimizers.state_of(optimizer)
    assert len(state) >= 1 + len(model.trainable_variables), "slots are missing: they would not be broadcast"
    keras_optimizers.build_optimizer(optimizer, model.trainable_variables)
    assert [id(v) for v in keras_optimizers.state_of(optimizer)] == [id(v) for v in state]
    given = []

    def make_update(apply):
        def update(grads, trainable_variables=None):
            given.extend(grads)
            return apply([tf.zeros_like(g) for g in grads], trainable_variables)

        return update

    before = model.get_weights()
    keras_optimizers.shadow_update(optimizer, make_update)
    model.train_on_batch(X, Y)
    keras_optimizers.unshadow_update(optimizer)
    assert len(given) == 2, "updates no longer go through apply or apply_gradients: nothing is averaged"
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not {"apply", "apply_gradients"} & set(vars(optimizer))


def test_inner_optimizers():
    inner = keras.optimizers.SGD(0.1)
    assert keras_optimizers.inner_optimizers(inner) == []
    assert keras_optimizers.inner_optimizers(loss_scaling()(inner)) == [inner]


def test_loss_scaling():
    """The method that scales a loss, and by how much; an optimizer that does not has none."""
    assert keras_optimizers.loss_scaling(keras.optimizers.SGD(0.1)) == ""
    scaling = loss_scaling()(keras.optimizers.SGD(0.1))
    method = getattr(scaling, keras_optimizers.loss_scaling(scaling))
    assert float(method(tf.constant(2.0))) == 2.0**16


@needs_keras_3
def test_loss_scaling_by_a_fixed_factor():
    assert keras_optimizers.loss_scaling(keras.optimizers.SGD(0.1, loss_scale_factor=8.0)) == "scale_loss"


def test_plain_sgd():
    assert keras_optimizers.is_plain_sgd(keras.optimizers.SGD(0.1))
    falling = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for more in ({"momentum": 0.9}, {"clipnorm": 1.0}, {"learning_rate": falling}):
        assert not keras_optimizers.is_plain_sgd(keras.optimizers.SGD(**more))
    assert not keras_optimizers.is_plain_sgd(keras.optimizers.Adam())


def test_plain_sgd_of_keras_2():
    older = keras if versions.is_keras_2(keras) else pytest.importorskip("tf_keras")
    for optimizers in (older.optimizers, older.optimizers.legacy):
        assert keras_optimizers.is_plain_sgd(optimizers.SGD(0.1))
        assert not keras_optimizers.is_plain_sgd(optimizers.SGD(0.1, momentum=0.9))
        assert not keras_optimizers.is_plain_sgd(optimizers.Adam())


def test_is_built():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    assert not keras_optimizers.is_built(optimizer)
    model = dense_model(optimizer)
    keras_optimizers.build_optimizer(optimizer, model.trainable_variables)
    assert keras_optimizers.is_built(optimizer), "slots would be made while a step is traced"


@pytest.mark.parametrize("make", KINDS)
def test_to_be_built(make):
    """These are there afterwards; nothing is there before."""
    model = dense_model(make())
    optimizer, weights = model.optimizer, model.trainable_variables
    stand_ins = keras_optimizers.to_be_built(optimizer, weights)
    assert not keras_optimizers.is_built(optimizer)
    if not KERAS_3 and keras_optimizers.inner_optimizers(optimizer):
        assert stand_ins is None  # Keras 2 does not make its loss scaling from settings
        return
    keras_optimizers.build_optimizer(optimizer, weights)
    state = keras_optimizers.state_of(optimizer)
    assert sorted(tuple(v.shape) for v in stand_ins) == sorted(tuple(v.shape) for v in state)
    assert keras_optimizers.to_be_built(optimizer, weights) == []


def test_not_known_what_is_to_be_built():
    class Own(keras.optimizers.SGD):
        def __init__(self, needed):
            super().__init__(needed)

    weights = dense_model().trainable_variables
    assert keras_optimizers.to_be_built(Own(0.1), weights) is None


@pytest.mark.parametrize("explicit", [False, True])
def test_update(explicit):
    model = dense_model()
    keras_optimizers.build_optimizer(model.optimizer, model.trainable_variables)
    before = model.get_weights()
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    given = model.trainable_variables if explicit or not KERAS_3 else None
    keras_optimizers.update(model.optimizer, gradients, given)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b - np.float32(0.01))


@needs_keras_3
def test_variables_to_apply():
    model = dense_model()
    keras_optimizers.build_optimizer(model.optimizer, model.trainable_variables)
    assert (
        keras_optimizers.variables_to_apply(model.optimizer, model.trainable_variables[:1])
        == (model.trainable_variables[:1])
    )
    built_with = keras_optimizers.variables_to_apply(model.optimizer, None)
    assert [id(v) for v in built_with] == [id(v) for v in model.trainable_variables], (
        "Optimizer._trainable_variables: gradients of apply(grads) cannot be told apart"
    )


def test_horovods_optimizer():
    """Horovod's wrapper is a class that it derives from the optimizer's."""

    class Wrapper(keras.optimizers.SGD):
        def _allreduce_grads(self, grads, variables):
            return grads

    wrapper = Wrapper(0.1)
    assert not keras_optimizers.is_horovod_optimizer(wrapper)
    wrapper._agg_helper = None
    assert keras_optimizers.is_horovod_optimizer(wrapper)
    assert keras_optimizers.horovod_averages(wrapper) is not KERAS_3
    assert not keras_optimizers.is_horovod_optimizer(keras.optimizers.SGD(0.1))
