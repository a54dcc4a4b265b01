"""Models of many kinds on three logical devices: batches of 16 rows in micro-batches of 6, 5 and 5."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.pipeline_fits import Training, assert_same_bits, fits_of
from tests.graph.pipeline_models import (
    EVEN,
    NEXT_WORDS,
    TWO_TEXTS,
    WORDS,
    Custom,
    Tied,
    X,
    Y,
    adam,
    constant_rows,
    encoder_decoder,
    frozen_backbone,
    long_tail,
    many_outputs,
    momentum,
    siamese,
    two_inputs,
    untied_embedding,
    used_twice,
)
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(60)]

TWO_INPUTS = ([X, WORDS.astype("float32")], Y)


def rmsprop():
    """Keras divides sparse gradients in a way that needs a tensor as long as a batch has rows."""
    return keras.optimizers.RMSprop(0.001, epsilon=1e-3)


def centered():
    """TensorFlow associates ``velocity - average**2 + epsilon`` otherwise where all is on one device."""
    return keras.optimizers.RMSprop(0.001, centered=True, epsilon=1e-3)


def accumulating():
    """Its updates are in the branches of a condition."""
    return keras.optimizers.RMSprop(0.001, centered=True, epsilon=1e-3, gradient_accumulation_steps=2)


def adadelta():
    return keras.optimizers.Adadelta(0.5)


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.02)


@pytest.mark.parametrize(
    ("make", "optimizer", "data", "schedule"),
    [
        pytest.param(Tied, adamw, (WORDS, NEXT_WORDS), "zb_h1", id="tied"),
        pytest.param(used_twice, momentum, TWO_INPUTS, "modulo", id="used_twice"),
        pytest.param(untied_embedding, momentum, (WORDS, Y), "zb_h2", id="untied_embedding"),
        pytest.param(constant_rows, adam, (WORDS.astype("int32"), Y), "zb_h1", id="constant_rows"),
        pytest.param(siamese, adam, TWO_TEXTS, "1f1b", id="siamese"),
        pytest.param(siamese, adamw, TWO_TEXTS, "zb_h2", id="siamese_adamw"),
        pytest.param(encoder_decoder, momentum, TWO_TEXTS, "zb_h1", id="encoder_decoder"),
        pytest.param(untied_embedding, rmsprop, (WORDS, Y), "zb_h2", id="divided_rows", marks=needs_keras_3),
        pytest.param(untied_embedding, centered, (WORDS, Y), "zb_h2", id="centered", marks=needs_keras_3),
        pytest.param(
            untied_embedding, accumulating, (WORDS, Y), "modulo", id="accumulating", marks=needs_keras_3
        ),
        pytest.param(siamese, adadelta, TWO_TEXTS, "1f1b", id="divided_rows_of_two", marks=needs_keras_3),
    ],
)
def test_models(make, optimizer, data, schedule):
    training = Training(make, optimizer, data)
    # With three layers and three devices the loss may be a stage of its own.
    fits = fits_of(training, "gpipe", schedule, microbatches=3)
    assert_same_bits(training, fits, far=1e-4, weights_everywhere=False)


def test_a_train_step_of_one_s_own():
    """Its loss is no metric."""
    training = Training(Custom, adam, EVEN, loss=None, metrics=None)
    assert_same_bits(training, fits_of(training, "gpipe", "zb_h1", microbatches=3), weights_everywhere=False)


@needs_keras_3
def test_many_outputs():
    """Losses, weights of rows, a metric with state: Keras 2 takes other forms of weights and metrics."""
    weights = {"class_": np.linspace(0.5, 1.5, len(X)), "size": np.linspace(2.0, 1.0, len(X))}
    targets = {"class_": Y, "size": (Y > 1).astype("float32")[:, None]}
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    training = Training(
        many_outputs,
        adam,
        ({"left": X}, targets, weights),
        loss={"class_": crossentropy, "size": "binary_crossentropy"},
        loss_weights={"class_": 0.7, "size": 1.3},
        metrics={"size": [keras.metrics.AUC()]},
    )
    fits = fits_of(training, "gpipe", "zb_h1", microbatches=3)
    assert_same_bits(training, fits, weights_everywhere=False)
    names = [name for name in training.stock.history if "auc" in name.lower()]
    assert names
    for name in names:
        assert fits["zb_h1"].history[name] == pytest.approx(training.stock.history[name], abs=1e-4)


def test_dropout_draws_the_same_masks_under_all_schedules():
    """Others than for one batch: test_pipeline_by_hand.py says which."""
    training = Training(two_inputs, momentum, TWO_INPUTS)
    # Keras 2 draws by counting in the op: all must have run the first step apart.
    fits = fits_of(training, "gpipe", "zb_h1", microbatches=3, measured_before=False)
    assert_same_bits(training, fits, far=None, weights_everywhere=False)


def test_layers_are_cut_before_their_weights():
    training = Training(frozen_backbone, momentum, EVEN)
    fits = fits_of(training, "gpipe", "modulo", microbatches=3)
    assert_same_bits(training, fits, far=1e-4, weights_everywhere=False)
    names = [row["name"] for row in fits["gpipe"].report.layers]
    assert [name.partition(" (")[0] for name in names[:-2]] == [f"before {names[-2]}"] * (len(names) - 2)
    assert len(names) > 5


@needs_keras_3
def test_layers_are_cut_behind_their_weights():
    training = Training(long_tail, adam, EVEN, epochs=3)
    fits = fits_of(training, "gpipe", "zb_h1", microbatches=3)
    assert_same_bits(training, fits, far=1e-4, weights_everywhere=False)
    for fitted in fits.values():
        assert any(row["name"].startswith("behind ") for row in fitted.report.layers)
