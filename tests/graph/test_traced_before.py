"""The first pipeline step is the step that ran on one device, placed: it is not traced again."""

from __future__ import annotations

import logging

import pytest

from tests.graph.pipeline_fits import Training, assert_equal_bits, assert_near, pipelined
from tests.graph.pipeline_graphs import assert_in_order
from tests.graph.pipeline_models import (
    EVEN,
    TWO_TEXTS,
    UNEVEN,
    Y,
    adam,
    batch_normalized,
    looped,
    mlp,
    momentum,
    normal,
    siamese,
    two_inputs,
    whole,
)
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(3), pytest.mark.takes(30), needs_keras_3]  # Keras 2 traces each part
FALLS_BACK = "the step is traced again"


def clipped():
    """All gradients together decide on each: ops that are of no layer."""
    return keras.optimizers.Adam(0.01, global_clipnorm=0.3)


def unchecked(*args, **settings):
    """Without the look at the loss, which traces a step of its own before the first one."""
    return pipelined(*args, check_loss=False, **settings)


class Counted:
    """Counts how often a fit has Python compute a micro-batch's step, and what was said."""

    def __init__(self, training, caplog):
        self.training, self.calls, self.caplog = training, 0, caplog
        self.train_step = training.model.train_step

    def fit(self, callback, **settings):
        self.calls, model = 0, self.training.model
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)  # a train_step of one's own is traced for that
        model.train_step = self._counted
        with self.caplog.at_level(logging.DEBUG, "tf_ooo"):
            fitted = self.training.piped(callback, **settings)
        del self.training.model.train_step
        return fitted

    def _counted(self, data):
        self.calls += 1
        return self.train_step(data)


@pytest.mark.parametrize(
    ("make", "optimizer", "data"),
    [
        pytest.param(batch_normalized, clipped, EVEN, id="batch_normalized"),
        pytest.param(two_inputs, adam, ([EVEN[0], whole(9, 48, 6).astype("float32")], Y), id="dropout"),
        pytest.param(siamese, clipped, TWO_TEXTS, id="slices"),
        pytest.param(looped, momentum, (normal(48, 4, 2), Y), id="looped"),
    ],
)
def test_it_has_the_bits_of_another_trace(make, optimizer, data, caplog):
    training = Training(make, optimizer, data, epochs=2)
    counted = Counted(training, caplog)
    before = counted.fit(unchecked("1f1b", profile_steps=1))
    assert counted.calls == 1, "one trace, of one micro-batch"
    assert FALLS_BACK not in caplog.text
    again = counted.fit(unchecked("gpipe"))  # the plan of the fit before: what it traces is placed at once
    assert counted.calls == 1
    assert_equal_bits(before.weights, again.weights)
    assert_equal_bits(before.state, again.state)
    assert before.history == again.history
    for fitted in (before, again):
        assert_in_order(fitted.report, 3, weights_everywhere=False)
        assert fitted.places == ["CPU:0"]


def test_other_rows_are_traced(caplog):
    """16 rows in parts of 4, and at the end 4 rows in parts of 1: one more trace, whichever step it is."""
    training = Training(mlp, momentum, UNEVEN, epochs=2)
    counted = Counted(training, caplog)
    fits = []
    for profile_steps in (0, 1, 3):  # the short batch is the third step after the first
        training._measured = None
        fits.append(counted.fit(unchecked("1f1b", profile_steps=profile_steps)))
        assert counted.calls == (3 if profile_steps == 3 else 2)
    for fitted in fits:
        assert_near(training.stock, fitted, 1e-4)
        assert_equal_bits(fits[0].weights, fitted.weights)


def test_another_trace_where_the_first_one_does_not_serve(caplog, monkeypatch):
    """With replicas=2 the first step adds up as two; for their own choice it is one.

    Or its graph cannot be taken.
    """
    training = Training(mlp, momentum, EVEN, epochs=1)
    counted = Counted(training, caplog)
    before = counted.fit(unchecked("1f1b", profile_steps=1))
    assert counted.calls == 1
    training._measured = None
    counted.fit(unchecked("1f1b", devices=2, replicas=2, profile_steps=1))
    assert counted.calls == 2
    assert FALLS_BACK not in caplog.text

    def refuse(*args):
        raise ValueError("it lacks an op")

    training._measured = None
    monkeypatch.setattr("tf_ooo.rewriting.result.OptimizedGraph", refuse)
    again = counted.fit(unchecked("1f1b", profile_steps=1))
    assert counted.calls == 2
    assert FALLS_BACK in caplog.text
    assert_equal_bits(before.weights, again.weights)
    assert_equal_bits(before.state, again.state)
