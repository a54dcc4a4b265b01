"""Checks run by worker.py on every rank: the order of computation and communication."""

from __future__ import annotations

import random
import time
from typing import Any

import keras
import pytest
import tensorflow as tf
import training as t
from checks_fit import warnings_of_tf_ooo

import tf_ooo
from tf_ooo.data_parallel import ordering, planned, scheduled
from tf_ooo.errors import OptionsError
from tf_ooo.planning import plan


def deep() -> keras.Model:
    layers = [keras.layers.Dense(16, activation="tanh") for _ in range(4)]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(4)])


def _against_stock(
    engine: Any, optimizer: Any, make: Any = deep, per_rank: Any = t.data, **options: Any
) -> Any:
    """50 steps in executions of 8: the bits of stock Horovod.  Returns the report."""
    a = t.compiled(make(), optimizer())
    b = t.compiled(make(), optimizer(), steps_per_execution=8)
    t.stock_in_apply(a, per_rank(engine.rank))
    callback = tf_ooo.OOOBackprop(mode="data_parallel", **options)
    t.fit(b, per_rank(engine.rank), [callback])
    assert t.same_bits(a, b)
    assert t.equal_on_all_ranks(engine, b)
    return callback.report


def check_reverse_first_k(engine: Any) -> None:
    report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01), schedule="reverse_first_k", k=3)
    assert not report.fell_back, report.fallback_reason
    assert report.schedule == "reverse_first_k"
    assert report.added_edges >= 8
    assert report.ops["comm"] == 10


def check_fast_forward_with_momentum(engine: Any) -> None:
    report = _against_stock(
        engine, lambda: keras.optimizers.SGD(0.05, momentum=0.9), schedule="fast_forward", profile_steps=1
    )
    assert not report.fell_back, report.fallback_reason
    assert report.measured_step_s is not None
    assert report.stock_step_s is not None


def check_one_step_at_a_time(engine: Any) -> None:
    """A named schedule also applies where an execution is one step."""
    model = t.compiled(deep(), keras.optimizers.SGD(0.05))
    callback = tf_ooo.OOOBackprop(mode="data_parallel", schedule="reverse_first_k", k=2)
    t.fit(model, t.data(engine.rank), [callback])
    assert not callback.report.fell_back, callback.report.fallback_reason
    assert t.equal_on_all_ranks(engine, model)


def check_a_named_schedule_of_an_eager_model_is_refused(engine: Any) -> None:
    model = t.compiled(deep(), "sgd", run_eagerly=True)
    with pytest.raises(OptionsError, match="runs eagerly"):
        t.ours(model, t.data(engine.rank, t.ROWS), options={"schedule": "reverse_first_k", "k": 1})


def check_k_is_chosen(engine: Any) -> None:
    report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01), schedule="reverse_first_k")
    assert not report.fell_back, report.fallback_reason
    assert report.predicted_step_s is not None
    plans = engine.gather(report.planned.to_text())
    assert len(set(plans)) == 1


def check_search(engine: Any) -> None:
    report = _against_stock(engine, lambda: keras.optimizers.AdamW(0.01), schedule="search")
    assert not report.fell_back, report.fallback_reason
    assert len(set(engine.gather(report.planned.to_text()))) == 1


def check_short_executions_between_whole_ones(engine: Any) -> None:
    """6 steps an epoch, 4 of them together; fewer than an execution has; 7 steps, 5 of them together."""
    for steps_per_execution, steps, unroll in ((4, 6, None), (16, 6, None), (7, 7, 5)):
        model = t.compiled(deep(), "adam", steps_per_execution=steps_per_execution)
        options = {"schedule": "fast_forward", "profile_steps": 1, "unroll": unroll}
        callback = tf_ooo.OOOBackprop(mode="data_parallel", **options)
        t.fit(model, t.data(engine.rank, steps * t.ROWS), [callback], epochs=6)
        assert callback.report.measured_step_s is not None
        assert callback.report.stock_step_s is not None
        assert not callback.report.fell_back, callback.report.fallback_reason


def check_a_short_first_fit_limits_no_later_one(engine: Any) -> None:
    model = t.compiled(deep(), "adam", steps_per_execution=8)
    callback = tf_ooo.OOOBackprop(mode="data_parallel", schedule="fast_forward", profile_steps=0)
    for steps in (1, 24):
        t.fit(model, t.data(engine.rank, steps * t.ROWS), [callback])
    assert callback._session._scheduled.steps == 8
    assert not callback.report.fell_back, callback.report.fallback_reason


def check_short_fits_are_profiled_in_the_end(engine: Any) -> None:
    model = t.compiled(deep(), "adam", steps_per_execution=2)
    callback = tf_ooo.OOOBackprop(mode="data_parallel", schedule="search", profile_steps=0)
    for steps in (2, 2, 12):
        t.fit(model, t.data(engine.rank, steps * t.ROWS), [callback])
    assert not callback.report.fell_back, callback.report.fallback_reason
    assert callback.report.schedule == "search"


def check_large_gradients_in_slices(engine: Any) -> None:
    """A plan that cuts the largest kernels: three slices of 16 x 16, and of what does not divide by three."""
    make, known = planned.make_plan, {}

    def slicing(layers: Any, link: Any, workers: int, *arguments: Any) -> Any:
        options = {"communication": "ordered", "slice_bytes": 400}
        costs = {"mode": "data_parallel", "devices": workers, "link": link}
        made = plan(layers=list(layers), schedule="search", evaluations=50, **costs, **options)
        known["parts"] = dict(made.parts)
        return planned.Planned(made, 1.0, 1.1)

    planned.make_plan = slicing
    try:
        report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01), schedule="search")
    finally:
        planned.make_plan = make
    assert not report.fell_back, report.fallback_reason
    assert engine.rank or known["parts"]
    assert report.ops["comm"] >= 10 + 2 * 4  # of five kernels and biases at least four kernels are cut


def check_auto(engine: Any) -> None:
    report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01))
    said = engine.gather([report.fell_back, report.schedule, report.undecided])
    assert all(one == said[0] for one in said)


def check_auto_goes_back_to_one_step_at_a_time(engine: Any) -> None:
    """Whatever the times are here: one step counts as faster."""
    needed, scheduled._CLEARLY = scheduled._CLEARLY, 1e9
    try:
        report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01), profile_steps=1)
    finally:
        scheduled._CLEARLY = needed
    assert report.fell_back
    assert "one step at a time took" in report.fallback_reason
    assert not report.undecided


def rnn() -> keras.Model:
    layers = [keras.layers.Reshape((4, 3)), keras.layers.Dense(5), keras.layers.LSTM(6)]
    return keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(4)])


def check_a_loops_weight_gradient_is_taken_apart(engine: Any) -> None:
    """An LSTM's dO and dW are one loop as TensorFlow makes it."""
    options = {"schedule": "fast_forward", "profile_steps": 1, "unroll": 2}
    report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01), rnn, **options)
    assert not report.fell_back, report.fallback_reason
    assert not report.mixed
    dense, lstm, _ = report.layers
    assert lstm["dW"] > dense["dW"]  # as one loop with dO they are as many


def check_a_pass_that_fails_on_one_rank_keeps_all_in_the_stock_order(engine: Any) -> None:
    ends = ordering.communication_edges

    def failing(*arguments: Any) -> Any:
        raise ValueError("made to fail")

    if engine.rank == 1:
        ordering.communication_edges = failing
    try:
        with warnings_of_tf_ooo():
            report = _against_stock(engine, lambda: keras.optimizers.Adam(0.01), schedule="fast_forward")
    finally:
        ordering.communication_edges = ends
    assert report.fell_back
    assert "made to fail" in report.fallback_reason


class Delays(keras.layers.Layer):
    """Waits for up to 10 ms, for another time on each rank, going forward and going back."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def waiting(x: Any) -> Any:
            return _late(x), _late

        return waiting(x)


def _late(x: Any) -> Any:
    def wait(value: Any) -> Any:
        time.sleep(random.random() * 0.01)
        return value

    out = tf.numpy_function(wait, [x], x.dtype)
    out.set_shape(x.shape)
    return out


def check_random_delays(engine: Any) -> None:
    """800 delays in 200 steps: no deadlock, and the same weights."""
    random.seed(engine.rank)

    def make() -> keras.Model:
        layers = [keras.layers.Dense(16), Delays(), keras.layers.Dense(16), Delays(), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((12,)), *layers])

    models = [t.compiled(make(), keras.optimizers.SGD(0.05), steps_per_execution=8) for _ in range(2)]
    xy = t.data(engine.rank, 200 * t.ROWS)
    for model, options in zip(models, ({"unroll": 1}, {"schedule": "search"}), strict=True):
        callback = tf_ooo.OOOBackprop(mode="data_parallel", **options)
        t.fit(model, xy, [callback])
    assert not callback.report.fell_back, callback.report.fallback_reason
    assert t.equal_on_all_ranks(engine, models[1])
    assert t.same_bits(*models)


def check_every_schedule_gives_the_bits_of_the_stock_order(engine: Any) -> None:
    """Also with TensorFlow's collectives, where there is no stock Horovod to compare with."""
    one = t.compiled(deep(), keras.optimizers.Adam(0.01))
    t.ours(one, t.data(engine.rank))
    for options in ({"schedule": "reverse_first_k", "k": 4}, {"schedule": "search"}, {}):
        model = t.compiled(deep(), keras.optimizers.Adam(0.01), steps_per_execution=4)
        callback = tf_ooo.OOOBackprop(mode="data_parallel", **options)
        t.fit(model, t.data(engine.rank), [callback])
        assert not options or not callback.report.fell_back, callback.report.fallback_reason
        assert t.same_bits(one, model)


def check_all_ranks_are_equal(engine: Any) -> None:
    for options in ({"schedule": "reverse_first_k", "k": 4}, {"schedule": "search"}):
        model = t.compiled(deep(), keras.optimizers.Adam(0.01), steps_per_execution=4)
        callback = tf_ooo.OOOBackprop(mode="data_parallel", **options)
        t.fit(model, t.data(engine.rank, 24 * t.ROWS), [callback])
        assert not callback.report.fell_back, callback.report.fallback_reason
        assert t.equal_on_all_ranks(engine, model)
