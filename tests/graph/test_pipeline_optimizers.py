"""Optimizers, their options, and callbacks that act on them, on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.graph.pipeline_fits import (
    Training,
    assert_near,
    assert_same_bits,
    compiled_model,
    distance,
    fits_of,
    pipelined,
)
from tests.graph.pipeline_graphs import assert_in_order
from tests.graph.pipeline_models import EVEN, UNEVEN, X_UNEVEN, Y_UNEVEN, adam, mlp, nested
from tests.zoo import keras, needs_keras_3
from tf_ooo.tracing.variables import optimizers_of

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(40)]


def test_plain_sgd():
    """Sees a factor on all gradients, as momentum does (test_pipeline_by_hand.py); a last batch of 4 rows."""
    training = Training(mlp, lambda: keras.optimizers.SGD(0.3), UNEVEN, epochs=5)
    assert_same_bits(training, fits_of(training, "gpipe", "zb_h1"))


@needs_keras_3
def test_several_optimizers():
    """keras.optimizers.MultiOptimizer: each layer's own."""
    models = []

    def make():
        models.append(mlp())
        return models[-1]

    def several():
        first = models[-1].layers[0].name
        by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {f"{first}/.*": adam()})
        return keras.optimizers.MultiOptimizer(by_path)

    training = Training(make, several, EVEN)
    assert_same_bits(training, fits_of(training, "gpipe", "1f1b"))
    counts = [int(optimizer.iterations) for optimizer in optimizers_of(models[-1])]
    assert sorted(counts) == [0, 21, 21]  # MultiOptimizer's own is not used


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.2, **options)


def decaying():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 3, 0.5))


def averaged(**options):
    return lambda: keras.optimizers.Adam(0.01, use_ema=True, **options)


def scheduler():
    return keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (1 + epoch))


def plateau():
    return keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0)


def stopping():
    return keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True)


def swapping():
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


@needs_keras_3
@pytest.mark.parametrize(
    ("optimizer", "callbacks"),
    [
        pytest.param(sgd(gradient_accumulation_steps=2), [], id="accumulation"),
        pytest.param(averaged(ema_overwrite_frequency=3), [], id="use_ema"),
        pytest.param(sgd(clipnorm=0.1), [], id="clipnorm"),
        pytest.param(sgd(clipvalue=0.01), [], id="clipvalue"),
        pytest.param(decaying, [], id="schedule"),
        pytest.param(averaged(), [swapping], id="swapped"),
    ],
)
def test_options_of_optimizers(optimizer, callbacks):
    assert_as_stock(nested_training(optimizer), *callbacks)


class Anchored(keras.optimizers.SGD):
    """Pulls weights to what it has copied when it was built, as Keras' ScheduleFreeAdamW begins."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.anchors = self.add_optimizer_variables(variables, "anchor")
            for anchor, variable in zip(self.anchors, variables, strict=True):
                self.assign(anchor, keras.ops.copy(variable))

    def update_step(self, gradient, variable, learning_rate):
        anchor = self.anchors[self._get_variable_index(variable)]
        super().update_step(gradient + 0.1 * (variable - anchor), variable, learning_rate)


@needs_keras_3
def test_what_an_optimizer_assigns_while_it_is_built_is_lost_as_in_stock():
    """Keras builds it in a trace that is thrown away."""
    training = nested_training(lambda: Anchored(0.1))
    assert_as_stock(training)
    alone = training.fit(tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=0))
    assert alone["loss"] == training.stock.history["loss"]


@needs_keras_3
@pytest.mark.parametrize("length", ["said", "unknown"])
def test_data_of_unknown_length(length):
    """Stock counts a step more at the end of each epoch; that is said before the first step."""
    data = tf.data.Dataset.from_tensor_slices((X_UNEVEN, Y_UNEVEN)).batch(16)
    steps = {"steps_per_epoch": 4} if length == "said" else {}
    data = data.filter(lambda x, y: True).repeat(2) if steps else data.filter(lambda x, y: True)
    counts = []
    for callbacks in ([], [pipelined("gpipe", devices=2)]):
        model = compiled_model(mlp, adam)
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks, **steps)
        counts.append(int(model.optimizer.iterations))
    said = any("does not say how long it is" in note for note in callbacks[0].report.notes)
    assert said == (counts[0] != counts[1]) == (not steps)


@pytest.fixture(scope="module")
def trained_by_sgd():
    return nested_training(sgd())


@needs_keras_3
@pytest.mark.parametrize("callback", [scheduler, plateau, stopping])
def test_callbacks_that_change_rates_or_stop(trained_by_sgd, callback):
    assert_as_stock(trained_by_sgd, callback)


def nested_training(optimizer):
    """Rows have weights, and the last batch has 4 of them."""
    weights = np.random.default_rng(2).random(52).astype("float32")
    return Training(nested, optimizer, (X_UNEVEN, Y_UNEVEN, weights), epochs=4)


def assert_as_stock(training, *callbacks):
    """Check what optimizers and callbacks of Keras do: weights, slots and logs are as in stock training."""
    stock = training.stock_with(*(make() for make in callbacks))
    fitted = training.piped(pipelined("zb_h1", microbatches=2), *(make() for make in callbacks))
    assert_near(stock, fitted, far=1e-5)
    assert distance(stock.state, fitted.state) < 1e-5
    assert stock.history.keys() == fitted.history.keys()
    for name, values in stock.history.items():
        assert fitted.history[name] == pytest.approx(values, rel=1e-4), name
    assert_in_order(fitted.report, 2)
