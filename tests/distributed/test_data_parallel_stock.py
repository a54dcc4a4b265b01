"""The bits of stock Horovod: one step at a time, and several in one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest

from tests.distributed import training as t
from tests.zoo import needs_keras_3
from tf_ooo.modes.data_parallel import planning

pytest.importorskip("horovod", reason="Horovod is not installed; run: make horovod")
pytestmark = [pytest.mark.ranks(2), pytest.mark.takes(70)]


@dataclass(frozen=True)
class Case:
    """Describes what is trained."""

    make: Callable[[], Any]
    optimizer: Callable[[], Any]
    data: Callable[[int], Any] = t.data
    fit: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "float32"
    together: int = 3

    def model(self, **more: Any) -> Any:
        with t.precision(self.policy):
            return t.compiled(self.make(), self.optimizer(), **more)


def _frozen() -> keras.Model:
    model = t.with_batch_norm()
    model.layers[0].trainable = False
    return model


def _encoder() -> keras.Model:
    """Sums of several gradients: TensorFlow adds them in the order of their names."""
    from benchmarks.models import Network

    keras.backend.clear_session()  # the same layer names each time
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 20}
    return Network("encoder", 1, (6,), sizes, classes=4).build()


def _loss_scaling() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), dynamic_growth_steps=10)


def _moving_averages() -> Any:
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7)


def _decay() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 7, 0.8))


CLASS_WEIGHTS = {"class_weight": {0: 2.0, 1: 0.5, 2: 1.0, 3: 3.0}}
CASES = {
    "momentum": Case(t.mlp, t.momentum),
    "adam_clipping_tied": Case(t.tied, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5)),
    "decay_batch_norm": Case(t.with_batch_norm, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02)),
    "embedding": Case(t.with_embedding, lambda: keras.optimizers.Adam(0.01), t.words),
    "accumulation": Case(t.mlp, lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)),
    "loss_scaling": Case(t.mlp, _loss_scaling, policy="mixed_float16"),
    "moving_averages_frozen_class_weights": Case(_frozen, _moving_averages, fit=CLASS_WEIGHTS),
    "learning_rate_schedule": Case(t.mlp, _decay),
    "encoder": Case(_encoder, t.momentum, t.words, together=2),
}
# Keras 2 accumulates no gradients; loss scaling is another class there.
KERAS_3_CASES = {"accumulation", "loss_scaling"}
STEP_BY_STEP = [name for name in CASES if name not in ("encoder", "learning_rate_schedule")]


@functools.cache
def stock(name: str, rank: int) -> tuple[list[str], list[str]]:
    """The bits before and after training with stock Horovod."""
    case = CASES[name]
    model = case.model()
    before = t.bits(model)
    t.stock_in_apply(model, case.data(rank), **case.fit)
    return before, t.bits(model)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs_keras_3] if name in KERAS_3_CASES else []) for name in STEP_BY_STEP],
)
def test_one_step_at_a_time(engine, name):
    case = CASES[name]
    before, after = stock(name, engine.rank)
    model = case.model()
    callback = t.ours(model, case.data(engine.rank), **case.fit)
    t.assert_not_reordered(callback.report)
    assert t.communicates(callback, model)
    assert before != after
    assert t.bits(model) == after
    assert t.equal_on_all_ranks(engine, model)


@needs_keras_3
@pytest.mark.parametrize("name", CASES)
def test_several_steps_in_the_stock_order_and_in_another(engine, name):
    """Single steps, then functions of several in either order by turns, then what is left over, singly."""
    case = CASES[name]
    before, after = stock(name, engine.rank)
    model = case.model(steps_per_execution=case.together)
    options = {"schedule": "fast_forward", "profile_steps": 1}
    callback = t.ours(model, case.data(engine.rank), options=options, **case.fit)
    report = callback.report
    assert not report.fell_back, report.fallback_reason
    assert report.measured_step_s is not None
    assert report.stock_step_s is not None
    assert report.ops["comm"] >= len(model.trainable_weights)
    t.assert_reordered(report, case.together)
    assert np.isfinite(model.history.history["loss"]).all()
    assert before != after
    assert t.bits(model) == after
    assert t.equal_on_all_ranks(engine, model)


@needs_keras_3
def test_overflow_on_one_rank(engine):
    x, y = t.data(engine.rank, 5 * t.ROWS)
    if engine.rank == 1:
        x[0, 0] = np.inf
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    model = t.compiled(t.mlp(), optimizer)
    before = t.bits(model)
    t.ours(model, (x, y))
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**14
    assert np.isfinite(model.get_weights()[0]).all()
    assert t.bits(model) != before
    assert t.equal_on_all_ranks(engine, model)


def test_horovods_tape(engine):
    """Equal bits with a step that averages in the tape; and that step is not averaged twice."""
    models = [t.compiled(t.mlp(), keras.optimizers.Adam(0.01))]
    models += [t.compiled(t.tape_model(t.mlp()), keras.optimizers.Adam(0.01)) for _ in range(2)]
    averages = t.ours(models[0], t.data(engine.rank))
    t.fit(models[1], t.data(engine.rank))
    leaves_alone = t.ours(models[2], t.data(engine.rank), options={"op": "Sum"})
    assert t.communicates(averages, models[0])
    assert t.communicates(leaves_alone, models[2])
    t.assert_not_reordered(averages.report)
    t.assert_not_reordered(leaves_alone.report)
    assert leaves_alone._life.mode.averaged.averaging.averaged == set()
    assert t.bits(models[0]) == t.bits(models[1])
    assert t.bits(models[1]) == t.bits(models[2])


def test_several_steps_per_execution_by_auto(engine, quick_plans, monkeypatch):
    """A plan that promises much is compared with the stock order, whichever is kept in the end."""
    monkeypatch.setattr(planning, "make_plan", t.certain_plan)
    one, several = (t.compiled(t.mlp(), "adam", steps_per_execution=k) for k in (1, t.TOGETHER))
    callback = t.ours(one, t.data(engine.rank))
    assert t.communicates(callback, one)
    t.assert_not_reordered(callback.report)
    callback = t.ours(several, t.data(engine.rank), options={"compare": True})
    t.assert_reordered(callback.report, t.TOGETHER)
    scheduled = callback._life.mode.scheduled
    compared = scheduled.stock, t.ordered_steps(scheduled).steps
    of_several = [t.communications(steps.function(t.TOGETHER)) for steps in compared]
    assert max(of_several) >= t.TOGETHER * len(several.trainable_weights)
    assert t.bits(one) == t.bits(several)
