"""The promise: the same bits after 20 steps, stock against rewritten, for what users train.

Each model is made once and trained twice from the same start.  The graph that TensorFlow hands over in fit is
looked at as well: optimized by Grappler, inlined and lowered, it has hardly a node of the trace.
"""

from __future__ import annotations

import pytest
from classification import check_fit, leaf_names

from tests import zoo, zoo_more
from tests.same_bits import NOTHING_MOVES, Training, assert_trains_alike
from tests.zoo import KERAS_3, needs_keras_3

pytestmark = pytest.mark.takes(80)

MODELS = {**zoo.SMALL, **zoo_more.MORE}


@pytest.fixture(scope="module")
def training(request):
    """The model of that name, trained in stock order."""
    return Training(lambda: zoo.compiled(MODELS[request.param]), request.param)


def of_models(*names):
    return pytest.mark.parametrize("training", names, indirect=True)


@of_models(*MODELS)
def test_models(training):
    assert_trains_alike(training, training.plain)


@of_models(*MODELS)
def test_the_graph_in_fit_is_classified(training):
    check_fit(training.model, training.plain.rewrites)


@of_models("convolutions", "lstm_gru", "residual")
def test_in_order(training):
    assert_trains_alike(training, training.ours(schedule="in_order"))


@of_models("mlp", "lstm_gru", "convolutions")
def test_turns_with_the_stock_step(training):
    """Two steps of each order are timed: both run in one training."""
    ours = training.ours(profile_steps=2)
    assert_trains_alike(training, ours)
    if KERAS_3 or training.name == "convolutions":  # Keras 2's dropout draws from a state of each function
        assert ours.report.stock_step_s > 0
        assert ours.report.measured_step_s > 0


def test_the_models_in_which_nothing_moves_are_models_of_the_zoo():
    assert NOTHING_MOVES.keys() <= set(MODELS)


@needs_keras_3  # Keras 2's LSTM and GRU are calls that a GPU replaces by cuDNN's
@of_models("bidirectional")
def test_separation_keeps_an_lstm_one_layer(training):
    lstm = ["bias", "kernel", "recurrent_kernel"]
    assert leaf_names(check_fit(training.model, training.plain.rewrites)) == [["bias", "kernel"], lstm, lstm]


@needs_keras_3
@of_models("lstm_gru")
def test_a_gru_with_reset_after_is_three_layers(training):
    """Its reset gate lies between the dO of the kernel and that of the recurrent kernel, and the two
    rows of its bias start from one each: no two of the three start from the same dO."""
    graph = check_fit(training.model, training.plain.rewrites)
    lstm = ["bias", "kernel", "recurrent_kernel"]
    assert leaf_names(graph) == [["bias"], ["bias", "kernel"], lstm, ["kernel"], ["recurrent_kernel"]]
