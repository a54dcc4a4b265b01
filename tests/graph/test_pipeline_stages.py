"""Stages that are given by hand, on three logical devices."""

from __future__ import annotations

import pytest

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_same_bits, fits_of
from tests.graph.pipeline_models import EVEN, deep, momentum

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(30)]


@pytest.fixture(name="training", scope="module")
def _training():
    return Training(deep, momentum, EVEN, epochs=3)


@pytest.fixture(name="names", scope="module")
def _names(training):
    fits = fits_of(training, "gpipe")
    return fits, [name for stage in fits["gpipe"].report.pipeline.stages for name in stage.layers]


def test_other_cuts_have_the_same_bits(training, names):
    """One layer, one, and all the others: no cut that the planner would take."""
    usual, layers = names
    stages = [layers[0], layers[1], layers[2]]
    fits = fits_of(training, "1f1b", stages=stages)
    assert [stage.layers[0] for stage in fits["1f1b"].report.pipeline.stages] == stages
    assert len(fits["1f1b"].report.pipeline.stages[2].layers) == len(layers) - 2
    assert len(usual["gpipe"].report.pipeline.stages[2].layers) < len(layers) - 2
    six = fits_of(training, "zb_v", stages=layers[:6])
    assert_same_bits(training, {**usual, **fits, **six}, far=None, weights_everywhere=False)


@pytest.mark.parametrize(
    ("picked", "message"),
    [
        (lambda names: [names[0], "no such", names[2]], "unknown layer 'no such'; known: "),
        (lambda names: names[:2], "'1f1b' on 3 devices takes 3 stages, got 2"),
        (lambda names: names[:6], "'1f1b' on 3 devices takes 3 stages, got 6"),
        (lambda names: names[1:4], "the first has to be"),
        (lambda names: [names[0], names[3], names[2]], "in the model's order"),
    ],
)
def test_stages_that_are_refused(training, names, picked, message):
    with pytest.raises(tf_ooo.OptionsError) as caught:
        fits_of(training, "1f1b", stages=picked(names[1]))
    assert message in str(caught.value)


def test_no_names():
    for wrong in ([], "dense", [3], ["a", "a"]):
        with pytest.raises(tf_ooo.OptionsError, match="^stages=.* is not accepted"):
            tf_ooo.Pipeline(stages=wrong)
