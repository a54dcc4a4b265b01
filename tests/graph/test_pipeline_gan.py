"""A generator and a critic with an optimizer each, in one ``train_step``, on two logical devices."""

from __future__ import annotations

import numpy as np
import pytest

import tf_ooo
from tests.graph.gans import Averaged, CalledCritic, CriticTwice, Gan, InTurns, LooksAgain, Noise, Penalty
from tests.graph.pipeline_fits import assert_equal_bits
from tests.graph.pipeline_graphs import Rewritten
from tests.graph.pipeline_models import normal
from tests.zoo import keras, needs_keras_3

pytestmark = [pytest.mark.devices(2), pytest.mark.takes(40), needs_keras_3]
X = normal(48, 7)


def trained(make, schedule=None, rows=48, **options):
    """Its weights, its history and the report of the callback."""
    keras.utils.set_random_seed(3)
    model = make()
    model.compile()
    model(X[:2])
    callbacks = []
    if schedule is not None:
        options = {"devices": 2, "microbatches": 2, "profile_steps": 0} | options
        callbacks.append(tf_ooo.OOOBackprop(tf_ooo.Pipeline(schedule=schedule, **options)))
    history = model.fit(
        X[:rows], X[:rows], batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=callbacks
    )
    return model.get_weights(), history.history, callbacks[0].report if callbacks else None


def assert_near(arrays, others):
    for ours, alone in zip(arrays, others, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [Gan, InTurns, CriticTwice, LooksAgain, CalledCritic])
def test_all_schedules_have_the_same_bits(make):
    """Schedules have the bits of one device up to rounding."""
    stock, history, _ = trained(make)
    weights = []
    for schedule in ("gpipe", "zb_h1", "zb_interleaved"):
        left, logs, report = trained(make, schedule)
        assert report.planned.policy == schedule
        assert set(report.planned.device_of_stage) == {0, 1}
        assert Rewritten(report).unordered() == []
        assert not any("wait for each other" in note for note in report.notes)
        weights.append(left)
        assert_near(left, stock)
        assert_near([logs[name] for name in history], history.values())
    for left in weights:
        assert_equal_bits(left, weights[0])


def test_turns_are_one_after_the_other():
    _, _, report = trained(InTurns, "zb_h1")
    (said,) = (note for note in report.notes if "turns" in note)
    assert "in 2 turns" in said
    tasks = set(Rewritten(report).tasks.values())
    assert {task.microbatch for task in tasks if task.kind == "F"} == {0, 1, 2, 3}
    layers = [row.name for row in report.layers]
    of_generator = [name.split("/")[0] == layers[0].split("/")[0] for name in layers]
    assert of_generator == sorted(of_generator, reverse=True), "the generator's layers come first"


@pytest.mark.parametrize(
    "options",
    [{"microbatches": 1}, {"microbatches": 4}, {"recompute": "all"}, {"first_steps": "cut"}],
    ids=str,
)
def test_in_turns(options):
    stock, history, _ = trained(InTurns)
    left, logs, _ = trained(InTurns, "zb_h1", **options)
    assert_near(left, stock)
    assert_near(logs.values(), history.values())


def test_a_gradient_penalty():
    stock, history, _ = trained(Penalty)
    fits = [trained(Penalty, schedule) for schedule in ("gpipe", "zb_h1")]
    assert_equal_bits(fits[0][0], fits[1][0])
    assert_near(fits[0][0], stock)
    assert_near(fits[0][1].values(), history.values())
    assert any("in 3 turns" in note for note in fits[0][2].notes)


@pytest.mark.devices(4)
def test_replicas_in_turns():
    """Each replica's lanes are in order, in both turns."""
    stock, _, _ = trained(InTurns)
    fits = [trained(InTurns, name, devices=4, microbatches=4, replicas=2) for name in ("gpipe", "zb_h1")]
    for left, _, report in fits:
        assert_near(left, stock)
        assert_equal_bits(left, fits[0][0])
        assert not any("wait for each other" in note for note in report.notes)


@pytest.mark.parametrize(("rows", "microbatches"), [(41, 2), (48, 3)], ids=["at the end", "always"])
def test_micro_batches_of_different_sizes_in_turns(rows, microbatches):
    """They are traced for any number of rows, as copies."""
    stock, history, _ = trained(InTurns, rows=rows)
    left, logs, _ = trained(InTurns, "zb_h1", rows, microbatches=microbatches)
    assert_near(left, stock)
    assert_near(logs.values(), history.values())


def test_micro_batches_in_turns_draw_different_numbers():
    fits = [trained(Noise, schedule) for schedule in ("gpipe", "zb_h1")]
    assert_equal_bits(fits[0][0], fits[1][0])
    graph = fits[0][2].rewritten_graph
    seeds = [node.attr["seed2"].i for node in graph.node if node.op == "RandomStandardNormal"]
    assert len(seeds) == len(set(seeds)) == 2


def test_a_state_that_follows_updated_weights_changes_once():
    """Not with each micro-batch."""
    stock, _, _ = trained(Averaged)
    for options in ({"microbatches": 4}, {"microbatches": 1}):
        fits = [trained(Averaged, schedule, **options)[0] for schedule in ("gpipe", "zb_h1")]
        assert_equal_bits(*fits)
        assert_near(fits[0], stock)
