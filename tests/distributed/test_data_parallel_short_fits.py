"""``auto`` begins to measure only where what is left of the fit pays for it, on all ranks or on none."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import tf_ooo
from keras_callbacks import GainLogger
from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.fit import timing
from tf_ooo.fit.mode import StockFirst
from tf_ooo.modes.data_parallel import planning

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [needs_keras_3, pytest.mark.ranks(2), pytest.mark.takes(45)]

EXECUTIONS = 8


def _trained(engine: Any, callback: tf_ooo.OOOBackprop, model: keras.Model, executions: int) -> Any:
    """The history of a fit of so many executions."""
    xy = t.data(engine.rank, executions * t.TOGETHER * t.ROWS)
    return t.fit(model, xy, [callback, GainLogger(callback)]).history


def _stock(engine: Any, executions: int) -> list[str]:
    model = t.compiled(t.deep(), t.momentum())
    t.stock_in_apply(model, t.data(engine.rank, executions * t.TOGETHER * t.ROWS))
    return t.bits(model)


def _model() -> keras.Model:
    return t.compiled(t.deep(), t.momentum(), steps_per_execution=t.TOGETHER)


@pytest.mark.parametrize("engine", [t.BY_HAND, t.COLLECTIVES], indirect=True)
def test_a_short_fit_stays_stock_and_says_why(engine):
    model, callback = _model(), tf_ooo.OOOBackprop(mode="data_parallel")
    history, report = _trained(engine, callback, model, EXECUTIONS), callback.report
    rows = dict(report.rows())
    assert report.fell_back
    assert "32 steps of " in report.fallback_reason
    assert report.fallback_reason.endswith("; compare=True compares")
    assert "too few to pay for a comparison" in report.headline
    assert (report.profiling_overhead_s, report.compared_steps, report.planned) == (0.0, 0, None)
    assert history["ooo_step_s"] == [report.stock_step_s]
    assert "step, stock" in rows
    assert rows["batch"] == "8 rows a step, on each of 2 ranks"
    assert len(set(engine.gather(report.fallback_reason))) == 1
    assert isinstance(callback._life.mode.scheduled.experiment.phase, StockFirst)  # nothing was profiled
    if engine.name == "horovod":
        assert t.bits(model) == _stock(engine, EXECUTIONS)
    assert t.equal_on_all_ranks(engine, model)


def test_a_fit_that_pays_is_compared_and_says_what_it_took(engine, quick_plans, monkeypatch):
    """The second fit of a callback whose first was too short; the bits are those of stock."""
    monkeypatch.setattr(planning, "make_plan", t.certain_plan)
    model, callback = _model(), tf_ooo.OOOBackprop(mode="data_parallel")
    _trained(engine, callback, model, EXECUTIONS)
    assert callback.report.fell_back
    known = callback._life.mode.scheduled
    monkeypatch.setattr(timing, "MOST", 1e9)
    _trained(engine, callback, model, EXECUTIONS + 40)
    report = callback.report
    assert callback._life.mode.scheduled is known
    assert not isinstance(known.experiment.phase, StockFirst)
    assert report.compared_steps > 0
    assert report.profiling_overhead_s > report.plan_seconds > 0
    assert "for further traces, profiling and planning" in dict(report.rows())["comparison"]
    assert report.moved_ops > 0
    decisions = engine.gather([report.schedule, report.fallback_reason, report.undecided])
    assert decisions[0] == decisions[1]
    assert t.equal_on_all_ranks(engine, model)
    alone = t.compiled(t.deep(), t.momentum())
    for executions in (EXECUTIONS, EXECUTIONS + 40):
        _trained(engine, tf_ooo.OOOBackprop(mode="data_parallel", compare=False), alone, executions)
    assert t.bits(model) == t.bits(alone)


def test_one_step_an_execution_says_its_batch_and_how_to_have_a_plan(engine):
    report = t.ours(t.compiled(t.deep(), t.momentum()), t.data(engine.rank)).report
    rows = dict(report.rows())
    assert rows["batch"] == "8 rows a step, on each of 2 ranks"
    assert (
        rows["measured timeline"]
        == "none: the stock step ran; timeline= records a plan, and with schedule='search' there is one"
    )


class Noisy(keras.layers.Layer):
    """Adds nothing, with the help of an op that keeps random numbers to itself."""

    def call(self, x: Any) -> Any:
        return x + 0.0 * tf.random.normal(tf.shape(x))


def test_a_step_that_draws_from_a_state_of_its_own_is_not_even_profiled(engine, monkeypatch):
    """Its ops would begin their random numbers anew in another function, however long the fit is."""
    monkeypatch.setattr(timing, "MOST", 1e9)
    layers = [keras.layers.Dense(16), Noisy(), keras.layers.Dense(4)]
    model = t.compiled(
        keras.Sequential([keras.Input((12,)), *layers]), t.momentum(), steps_per_execution=t.TOGETHER
    )
    callback = tf_ooo.OOOBackprop(mode="data_parallel")
    with t.warnings_of_tf_ooo():
        _trained(engine, callback, model, EXECUTIONS)
    assert callback.report.fell_back
    assert "draws random numbers from a state of its own; name a schedule" in callback.report.fallback_reason
    assert callback.report.profiling_overhead_s == 0.0
    assert t.equal_on_all_ranks(engine, model)
