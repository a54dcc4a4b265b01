"""Several steps in one function: what callbacks see, where it stops, what is left over."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.modes.data_parallel import planning

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.ranks(2), pytest.mark.takes(25)]

ORDERED = {"schedule": "fast_forward", "profile_steps": 0}


def _is_reordered(callback: Any) -> bool:
    report = callback.report
    return not report.fell_back and report.added_edges > 0 and report.moved_ops > 0


def test_what_callbacks_see_between_executions(engine):
    """A checkpoint taken there holds every update."""
    seen: list[dict[int, Any]] = []
    for steps_per_execution in (1, t.TOGETHER):
        model = t.compiled(t.mlp(), keras.optimizers.Adam(0.01), steps_per_execution=steps_per_execution)
        at: dict[int, Any] = {}
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, at=at, model=model: at.setdefault(
                int(model.optimizer.iterations.numpy()), model.get_weights()
            )
        )
        callback = t.ours(model, t.data(engine.rank), [note], options=ORDERED)
        assert _is_reordered(callback)
        seen.append(at)
    assert sorted(seen[0]) == list(range(1, 23))
    assert sorted(seen[1]) == [4, 8, 12, 16, 20, 22]
    for steps, weights in seen[1].items():
        for several, single in zip(weights, seen[0][steps], strict=True):
            np.testing.assert_array_equal(several, single)


def test_logs_are_those_of_keras(engine):
    """Callbacks see these after each execution, and at the end of the epoch, with metrics."""
    seen: list[list[Any]] = []
    for options in ({"unroll": 1}, {"unroll": 4} | ORDERED):
        model = t.compiled(t.mlp(), "adam", metrics=["accuracy"], steps_per_execution=4)
        mine: list[Any] = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, mine=mine: mine.append(
                (batch, {k: float(v) for k, v in logs.items()})
            ),
            on_epoch_end=lambda epoch, logs, mine=mine: mine.append((epoch, dict(logs))),
        )
        callback = t.ours(model, t.data(engine.rank, 9 * t.ROWS + 3), [note], epochs=2, options=options)
        seen.append(mine)
    assert _is_reordered(callback)
    assert len(seen[0]) == 8  # three executions an epoch and its end, twice
    assert seen[0] == seen[1]


def test_stops_after_the_execution_in_which_it_is_told(engine):
    """It stops where Keras does."""
    model = t.compiled(t.mlp(), "adam", steps_per_execution=4)
    callback = t.ours(model, t.data(engine.rank, 80), [t.CountSteps(stop_at=2)], epochs=3, options=ORDERED)
    assert _is_reordered(callback)
    assert int(model.optimizer.iterations.numpy()) == 8
    assert t.equal_on_all_ranks(engine, model)


def _in_parts(engine: Any, **more: Any) -> None:
    a, b = (t.compiled(t.mlp(), "adam", steps_per_execution=k) for k in (1, 5))
    x, y = t.data(engine.rank, 12 * t.ROWS)
    weights = np.linspace(0.5, 1.5, len(x)).astype("float32")
    for model, options in ((a, {}), (b, {"unroll": 2} | more)):
        for _ in range(2):
            lockstep = {"lockstep": "execution"}
            callback = t.ours(model, (x, y), epochs=2, sample_weight=weights, options=options | lockstep)
    t.assert_reordered(callback.report, 2)
    assert callback._life.mode.scheduled.steps == 2
    assert int(b.optimizer.iterations.numpy()) == 48
    assert t.bits(a) == t.bits(b)


def test_an_execution_longer_than_unroll(engine):
    """Batches of unknown number; sample weights; a second fit."""
    _in_parts(engine, **ORDERED)


@pytest.mark.parametrize("engine", [t.COLLECTIVES], indirect=True)
def test_an_execution_longer_than_unroll_with_collectives(engine, quick_plans, monkeypatch):
    """By ``auto``: costs are measured in the parts of an execution; the plan promises much, so it is run."""
    monkeypatch.setattr(planning, "make_plan", t.certain_plan)
    _in_parts(engine, profile_steps=1, compare=True)
