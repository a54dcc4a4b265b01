"""``mode="pipeline"`` on two logical devices: the first fit of a model, and what equals stock training."""

from __future__ import annotations

import importlib.util

import pytest

from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_same_bits, fits_of, pipelined
from tests.graph.pipeline_models import (
    EVEN,
    IMAGES,
    UNEVEN,
    X,
    Y,
    adam,
    adam_of_larger_gradients,
    attention,
    conv_with_skips,
    mlp,
    positions,
    whole,
)
from tests.zoo import KERAS_3, keras

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(40)]


def test_two_devices_and_uneven_batches():
    """20 steps, every fourth with fewer rows; each schedule in the first fit of a new model, profiled."""
    settings = {"data": UNEVEN, "epochs": 5}
    fits = {}
    for schedule in ("gpipe", "zb_h1"):
        training = Training(mlp, adam, **settings)
        fits |= fits_of(training, schedule, profile_steps=3)
        assert fits[schedule].report.costs.source.startswith("measured")
    assert_same_bits(training, fits)
    assert all(fitted.history["accuracy"] == training.stock.history["accuracy"] for fitted in fits.values())


@pytest.mark.parametrize(
    ("make", "data"),
    [(mlp, EVEN), (conv_with_skips, (IMAGES, Y)), (attention, (whole(19, 48, 8).astype("int32"), Y))],
)
def test_one_device_and_one_micro_batch_is_stock(make, data):
    training = Training(make, adam, data)
    alone = training.piped(pipelined("gpipe", devices=1, microbatches=1))
    assert_equal_bits(alone.weights, training.stock.weights)
    assert_equal_bits(alone.state, training.stock.state)
    assert alone.history == training.stock.history
    # Rewritten all the same: its tasks, in a row on the one device.
    assert alone.report.added_edges > 0
    assert alone.report.moved_ops > 0


def test_positions():
    training = Training(positions, adam_of_larger_gradients, (whole(50, *X.shape), Y))
    assert_same_bits(training, fits_of(training, "gpipe", "zb_h1"))


def legacy_optimizers():
    """Keras 2: one op updates a weight and its slots, all of which must be on the weight's device."""
    if KERAS_3:
        return {"adam": None}
    legacy = keras.optimizers.legacy
    optimizers = {
        "adam": lambda: legacy.Adam(0.01, amsgrad=True),
        "momentum": lambda: legacy.SGD(0.01, momentum=0.9, nesterov=True),
        "rmsprop": lambda: legacy.RMSprop(0.001, momentum=0.9, centered=True),
        "ftrl": lambda: legacy.Ftrl(0.01),
    }
    if importlib.util.find_spec("tensorflow_addons"):
        import tensorflow_addons as tfa

        optimizers |= {
            "adamw": lambda: tfa.optimizers.AdamW(1e-4, 0.01),
            "lazy": lambda: tfa.optimizers.LazyAdam(0.01),
            "average": lambda: tfa.optimizers.MovingAverage("adam"),
            "novograd": lambda: tfa.optimizers.NovoGrad(0.01),
        }
    return optimizers


@pytest.mark.skipif(KERAS_3, reason="Keras 3 has no legacy optimizers")
@pytest.mark.parametrize("name", legacy_optimizers())
def test_legacy_optimizers(name):
    training = Training(mlp, legacy_optimizers()[name], EVEN)
    assert_same_bits(training, fits_of(training, "gpipe", "zb_h1"), far=1e-4)
