"""Convolutions with skips, recurrent layers and their loops, on two logical devices."""

from __future__ import annotations

import pytest

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_same_bits, fits_of
from tests.graph.pipeline_graphs import Rewritten
from tests.graph.pipeline_models import (
    IMAGES,
    NEXT_WORDS,
    WORDS,
    LanguageModel,
    Y,
    adam,
    conv_with_skips,
    looped,
    looped_again,
    looped_residual,
    momentum,
    normal,
    unrolled,
)
from tests.zoo import KERAS_3, keras, needs_keras_3
from tf_ooo.costs import CostTable

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(60)]


def cut_at(layers, cut):
    """Costs of equal layers below a cut and of equal layers above it, as long together."""
    seconds = [[layers - cut, cut][number >= cut] for number in range(layers)]
    return costs_of(seconds)


def costs_of(seconds):
    return CostTable([tf_ooo.LayerCosts(s, s, s) for s in seconds])


def test_convolutions_with_skips():
    def clipped():
        return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1)

    training = Training(conv_with_skips, clipped, (IMAGES, Y))
    fits = fits_of(training, "gpipe", "interleaved_1f1b", "modulo", "zb_v")
    assert_same_bits(training, fits)


def test_unrolled_loops():
    training = Training(unrolled, adam, (normal(48, 4, 2), Y), epochs=3)
    assert_same_bits(training, fits_of(training, "gpipe", "zb_h1", microbatches=2), far=1e-4)


def two_lstms():
    lstms = [keras.layers.LSTM(6, return_sequences=True), keras.layers.LSTM(6)]
    return keras.Sequential([keras.Input((4, 2)), *lstms, keras.layers.Dense(3)])


@needs_keras_3
def test_two_lstms_on_two_devices():
    """Each with its loops: forward and backward in two micro-batches."""
    training = Training(two_lstms, adam, (normal(48, 4, 2), Y), epochs=2)
    fits = fits_of(training, "gpipe", "zb_h1", "modulo", microbatches=2, costs=costs_of([2, 1.5, 0.5]))
    assert_same_bits(training, fits, far=1e-4)
    for fitted in fits.values():
        assert Rewritten(fitted.report).loops_by_device() == {"CPU:0": 4, "CPU:1": 4}


@pytest.fixture(scope="module")
def looped_training():
    return Training(looped, adam, (normal(48, 4, 2), Y), epochs=3)


# A GRU of Keras 3 takes its bias apart, a layer of costs for each part.
LAST = 5 if KERAS_3 else 3


@pytest.mark.parametrize(
    ("seconds", "started"),
    [
        pytest.param([LAST, *[1] * LAST], (4, 8), id="behind_the_first"),
        pytest.param([*[1] * (LAST - 1), LAST - 2, 1], (8, 4), id="behind_the_second"),
    ],
)
def test_cuts_between_loops(looped_training, seconds, started):
    """Three layers' loops, forward and backward, in two micro-batches; each whole.

    Keras 2 hides those of LSTM and GRU in functions.
    """
    fits = fits_of(looped_training, "gpipe", "zb_h1", microbatches=2, costs=costs_of(seconds))
    assert_same_bits(looped_training, fits, far=1e-4)
    started = dict(zip(("CPU:0", "CPU:1"), started, strict=True)) if KERAS_3 else {"CPU:1": 4}
    assert [Rewritten(fitted.report).loops_by_device() for fitted in fits.values()] == [started] * 2


TRAININGS = {
    "residual": (lambda: Training(looped_residual, momentum, (normal(48, 4, 3), Y), epochs=2), 4),
    "used_again": (lambda: Training(looped_again, momentum, (normal(48, 4, 6), Y), epochs=2), 3),
    "tied": (lambda: Training(LanguageModel, adam, (WORDS, NEXT_WORDS), epochs=2), 3),
}


@pytest.fixture(scope="module")
def loop_trainings():
    return {name: (make(), layers) for name, (make, layers) in TRAININGS.items()}


@pytest.mark.parametrize(
    ("name", "cut"), [(n, cut) for n, (_, count) in TRAININGS.items() for cut in range(1, count)]
)
def test_what_comes_out_of_a_loop_meets_something_lower(loop_trainings, name, cut):
    """Under each cut that there is."""
    training, layers = loop_trainings[name]
    fits = fits_of(training, "gpipe", "zb_h1", microbatches=2, costs=cut_at(layers, cut))
    assert_same_bits(training, fits, far=1e-4)
