"""Convolutions with skips, recurrent layers and their loops, on two logical devices."""

from __future__ import annotations

import itertools

import pytest

import tf_ooo
from tests.graph.pipeline_fits import Training, assert_same_bits, fits_of, pipelined
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


@needs_keras_3
def test_tasks_wait_for_the_end_of_the_loop_before():
    """Also where nothing of that task comes behind it but the sum of gradients, which is in no task."""
    training = Training(two_lstms, adam, (normal(48, 4, 2), Y), epochs=1)
    fitted = fits_of(training, "1f1b", microbatches=3, check_loss=False, costs=costs_of([2, 1.5, 0.5]))[
        "1f1b"
    ]
    rewritten = Rewritten(fitted.report)
    index, waited = rewritten.index, 0
    members = {}
    for name, task in rewritten.tasks.items():
        members.setdefault(task, []).append(index.index[name])
    for lane in rewritten.planned.lanes.values():
        ordered = [task for task in lane if task in members and task.kind != "U"]
        for before, after in itertools.pairwise(ordered):
            ends = [i for i in members[before] if index.ops[i] == "Exit"]
            if (before.stage, before.microbatch) != (after.stage, after.microbatch):
                waited += len(ends)
                assert all(any(index.implied(i, j) for j in members[after]) for i in ends), (before, after)
    assert waited > 20


def two_lstms_of(steps):
    lstms = [keras.layers.LSTM(6, return_sequences=True), keras.layers.LSTM(6)]
    return keras.Sequential([keras.Input((steps, 2)), *lstms, keras.layers.Dense(3)])


def two_lstms():
    return two_lstms_of(4)


@pytest.fixture(scope="module")
def two_lstms_training():
    return Training(two_lstms, adam, (normal(48, 4, 2), Y), epochs=2)


@needs_keras_3
def test_two_lstms_on_two_devices(two_lstms_training):
    """Each with its loops: forward and backward in two micro-batches."""
    given = {"microbatches": 2, "costs": costs_of([2, 1.5, 0.5])}
    fits = fits_of(two_lstms_training, "gpipe", "zb_h1", "modulo", **given)
    assert_same_bits(two_lstms_training, fits, far=1e-4)
    for fitted in fits.values():
        assert Rewritten(fitted.report).loops_by_device() == {"CPU:0": 4, "CPU:1": 4}


def with_mask():
    """Rows that begin with masked time steps, and one below that runs backwards."""
    stacked = [
        keras.layers.Masking(-9.0),
        keras.layers.GRU(6, return_sequences=True, go_backwards=True),
        keras.layers.LSTM(5, dropout=0.2),
    ]
    return keras.Sequential([keras.Input((16, 2)), *stacked, keras.layers.Dense(3)])


def masked_rows(rows):
    values = normal(rows, 16, 2)
    values[::2, :9] = -9.0
    return values


TIME_STEPS = {
    "lstm": (lambda: [keras.layers.Dense(4), keras.layers.LSTM(6)], 3, [1, 8, 1]),
    "cells": (
        lambda: [keras.layers.RNN([keras.layers.GRUCell(4), keras.layers.LSTMCell(3)])],
        2,
        [1, 1, 1, 30, 1],
    ),
    "both_ways": (lambda: [keras.layers.Bidirectional(keras.layers.SimpleRNN(6))], 2, [9, 1, 1]),
}


@needs_keras_3
@pytest.mark.parametrize("name", TIME_STEPS)
def test_time_steps_on_two_devices(name):
    """The loop of a layer is several, of which each is on one device; the bits are those of any schedule."""
    make, parts, seconds = TIME_STEPS[name]

    def model():
        return keras.Sequential([keras.Input((16, 2)), *make(), keras.layers.Dense(3)])

    training = Training(model, adam, (normal(48, 16, 2), Y), epochs=2)
    given = {"microbatches": 2, "loop_parts": parts, "costs": costs_of(seconds)}
    fits = fits_of(training, "gpipe", "zb_h1", **given)
    assert_same_bits(training, fits, far=1e-4)
    for fitted in fits.values():
        loops = Rewritten(fitted.report).loops_by_device()
        assert loops.keys() == {"CPU:0", "CPU:1"}
        assert sum(loops.values()) == 4 * parts * (2 if name == "both_ways" else 1)
        assert Rewritten(fitted.report).uphill() == []


@needs_keras_3
def test_masks_and_dropout_in_parts():
    uncut, training = (Training(with_mask, adam, (masked_rows(48), Y), epochs=2) for _ in range(2))
    given = {"microbatches": 2, "check_loss": False}
    whole = fits_of(uncut, "gpipe", loop_parts=1, **given)["gpipe"]
    fits = fits_of(training, "1f1b", "zb_v", loop_parts=2, **given)
    for fitted in fits.values():
        assert fitted.history == fits["1f1b"].history
        assert fitted.history["loss"] == pytest.approx(whole.history["loss"], rel=1e-5)
        assert any("later in" in layer for stage in fitted.report.pipeline.stages for layer in stage.layers)


def test_loops_that_cannot_be_parted(two_lstms_training):
    """Keras 2 is left as it is where parts are asked for, and so are layers of few time steps."""
    asked = pipelined("gpipe", microbatches=2, loop_parts=2)
    fitted = two_lstms_training.piped(asked, measured_before=False)
    assert fitted.history["loss"] == pytest.approx(two_lstms_training.stock.history["loss"], rel=1e-4)
    names = [layer for stage in fitted.report.pipeline.stages for layer in stage.layers]
    assert not any("later in" in name for name in names)


@needs_keras_3
def test_loops_of_parts_never_run_again():
    def model():
        gelu = keras.layers.Dense(8, activation="gelu")
        return keras.Sequential([keras.Input((16, 2)), gelu, keras.layers.LSTM(6), keras.layers.Dense(3)])

    training = Training(model, adam, (normal(48, 16, 2), Y), epochs=1)
    given = {"microbatches": 2, "loop_parts": 2, "costs": costs_of([1, 8, 1]), "check_loss": False}
    plain = fits_of(training, "gpipe", **given)
    again = fits_of(training, "gpipe", recompute="all", **given)["gpipe"]
    assert again.history == plain["gpipe"].history
    names = [layer for stage in again.report.pipeline.stages for layer in stage.layers]
    repeated = [names[number] for number in again.report.planned.recompute]
    assert repeated
    assert not any("lstm" in name for name in repeated)


@needs_keras_3
def test_a_weight_of_several_stages_is_sent_once():
    """For all micro-batches and time steps."""
    training = Training(lambda: two_lstms_of(16), adam, (normal(48, 16, 2), Y), epochs=1)
    given = {"microbatches": 2, "loop_parts": 2, "costs": costs_of([9, 1, 1]), "check_loss": False}
    fitted = fits_of(training, "1f1b", **given)["1f1b"]
    graph = fitted.report.rewritten_graph
    devices = {node.name: node.device for node in graph.node}
    reads = [node.name for node in graph.node if node.op == "ReadVariableOp" and "adam" not in node.name]
    away = {
        text for node in graph.node for text in node.input if text in reads and devices[text] != node.device
    }
    assert len(away) == 3  # kernel, recurrent kernel, bias


# A GRU of Keras 3 takes its bias apart, a layer of costs for each part.
LAST = 5 if KERAS_3 else 3
BEHIND_FIRST, BEHIND_SECOND = costs_of([LAST, *[1] * LAST]), costs_of([*[1] * (LAST - 1), LAST - 2, 1])
# Keras 2 hides the loops of LSTM and GRU in functions.
STARTED = [{"CPU:0": 4, "CPU:1": 8}, {"CPU:0": 8, "CPU:1": 4}] if KERAS_3 else [{"CPU:1": 4}] * 2
MODELS = {
    "looped": (looped, adam, (normal(48, 4, 2), Y), [BEHIND_FIRST, BEHIND_SECOND]),
    "residual": (looped_residual, momentum, (normal(48, 4, 3), Y), [cut_at(4, cut) for cut in (1, 2, 3)]),
    "used_again": (looped_again, momentum, (normal(48, 4, 6), Y), [cut_at(3, cut) for cut in (1, 2)]),
    "tied": (LanguageModel, adam, (WORDS, NEXT_WORDS), [cut_at(3, cut) for cut in (1, 2)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_out_of_a_loop_meets_something_lower(name):
    """Under each cut that there is, and under two where three whole loops are stacked."""
    *model, cuts = MODELS[name]
    training, fits = Training(*model, epochs=2), {}
    for cut, costs in enumerate(cuts):
        given = {"microbatches": 2, "costs": costs, "check_loss": name in ("looped", "tied")}
        for schedule in ("zb_h1",) if cut else ("gpipe", "zb_h1"):
            fitted = fits[schedule, cut] = training.piped(pipelined(schedule, **given))
            if name == "looped":
                assert Rewritten(fitted.report).loops_by_device() == STARTED[cut]
    assert_same_bits(training, fits, far=1e-4)
