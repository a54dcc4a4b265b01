"""memory_limit_bytes is hard: also where the graph leaves the batch open, and before anything has run."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests import zoo
from tf_ooo.fit import controller

BATCH, WIDTH = 10, 40
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, WIDTH)).astype("float32")  # 64 rows: the last batch is smaller, so none is fixed
Y = RNG.integers(0, 3, 64)
HUGE = 10**12


def build(**options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False, **options)
    zoo.make_variables(model, X, Y)
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, *callbacks, batch_size=BATCH, **options):
    history = model.fit(
        X, Y, batch_size=batch_size, epochs=2, verbose=0, callbacks=list(callbacks), **options
    )
    return history.history["loss"], model.get_weights()


def state(model):
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)]


def assert_equal(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@functools.cache
def peak_of(batch_size, **options):
    callback = tf_ooo.OOOBackprop(memory_limit_bytes=HUGE, profile_steps=0, strict=True)
    fit(build(**options), callback, batch_size=batch_size)
    assert callback.report.unknown_size_ops == 0
    return callback.report.predicted_peak_bytes


@pytest.mark.parametrize("steps", [1, 2])
def test_fit_counts_the_real_batch(steps):
    peaks = [peak_of(batch_size, steps_per_execution=steps) for batch_size in (10, 30)]
    one_activation = 20 * WIDTH * 4  # 20 more rows of float32
    assert peaks[1] - peaks[0] >= 2 * one_activation
    assert peaks[0] > 0


@pytest.mark.parametrize("steps", [1, 2])
def test_the_peak_is_that_of_the_batches_that_trained(steps):
    """Nothing was said of their size."""
    callback = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=1)
    limited = tf_ooo.OOOBackprop(schedule="fast_forward", profile_steps=1, memory_limit_bytes=HUGE)
    for each in (callback, limited):
        fit(build(steps_per_execution=steps), each)
    report = callback.report
    assert report.unknown_size_ops > 0
    assert report.predicted_peak_bytes == limited.report.predicted_peak_bytes
    assert f", batches of {BATCH} rows" in report.summary()


@pytest.mark.parametrize("steps", [1, 2])
def test_looking_at_the_first_batch_changes_nothing(steps):
    stock, ours = build(steps_per_execution=steps), build(steps_per_execution=steps)
    callback = tf_ooo.OOOBackprop(memory_limit_bytes=HUGE, profile_steps=1)
    one, two = fit(stock), fit(ours, callback)
    assert one[0] == two[0]
    assert_equal(one[1], two[1])
    assert callback.report.added_edges > 0
    assert callback.report.moved_ops > 0
    assert len(callback._life.mode.controller.inputs._known) == 1


def test_a_generator_loses_no_batch():
    given = []

    def batches():
        for i in range(7):
            given.append(i)
            yield X[i * 9 : i * 9 + 9], Y[i * 9 : i * 9 + 9]

    spec = (tf.TensorSpec((None, WIDTH)), tf.TensorSpec((None,), tf.int64))
    weights = []
    ours = tf_ooo.OOOBackprop(memory_limit_bytes=HUGE, profile_steps=1)
    for callbacks in ([], [ours]):
        model = build()
        data = tf.data.Dataset.from_generator(batches, output_signature=spec)
        model.fit(data, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    assert ours.report.added_edges > 0
    assert ours.report.moved_ops > 0
    assert given == [*range(7)] * 2
    assert_equal(*weights)


@pytest.mark.parametrize("schedule", ["auto", "fast_forward"])
def test_refused_before_anything_has_changed(schedule):
    model = build()
    limit = peak_of(BATCH) - 1
    before = state(model)
    with pytest.raises(tf_ooo.MemoryLimitError, match="at least") as caught:
        fit(model, tf_ooo.OOOBackprop(schedule=schedule, memory_limit_bytes=limit))
    assert caught.value.smallest_bytes == limit + 1
    assert_equal(before, state(model))
    fit(model)


def test_a_limit_that_fits_is_kept():
    limit = peak_of(BATCH)
    callback = tf_ooo.OOOBackprop(memory_limit_bytes=limit, strict=True)
    fit(build(), callback)
    assert callback.report.predicted_peak_bytes <= limit


@pytest.mark.parametrize("loss", ["mse", "huber", "log_cosh", "kl_divergence", "binary_crossentropy"])
def test_losses_that_broadcast_are_counted(loss):
    """Along which axes they do is found out by ops whose outputs the graph gives no size."""
    model = build()
    model.compile("adam", loss, jit_compile=False)
    targets, callback = RNG.uniform(size=(64, 3)), tf_ooo.OOOBackprop(memory_limit_bytes=HUGE, strict=True)
    model.fit(X, targets, batch_size=BATCH, verbose=0, callbacks=[callback])
    assert callback.report.unknown_size_ops == 0
    assert 0 <= callback.report.predicted_peak_bytes - peak_of(BATCH) < 2 * BATCH * WIDTH * 4


def test_batch_size_goes_before_what_is_seen():
    callback = tf_ooo.OOOBackprop(memory_limit_bytes=HUGE, batch_size=30, strict=True)
    fit(build(), callback)
    assert callback.report.predicted_peak_bytes == peak_of(30)


def step_over(weights, **options):
    @tf_ooo.function(memory_limit_bytes=HUGE, **options)
    def step(x):
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean(value**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def make_weights():
    return [tf.Variable(np.full((WIDTH, WIDTH), 0.1, "float32")) for _ in range(3)]


def with_open_batch(step, limit, weights):
    """The step for any number of rows, in one trace."""
    signature = [tf.TensorSpec((None, WIDTH), tf.float32)]
    function = tf.function(step.python_function, input_signature=signature)
    return tf_ooo.function(function, memory_limit_bytes=limit, schedule="in_order")


def test_a_larger_batch_later_is_refused_before_it_runs():
    weights = make_weights()
    step = step_over(weights)
    step(X[:8])
    assert step.report.unknown_size_ops == 0
    limit = int(step.report.predicted_peak_bytes * 1.5)
    opened = with_open_batch(step, limit, weights)
    opened(X[:8])
    before = [w.numpy() for w in weights]
    with pytest.raises(tf_ooo.MemoryLimitError, match="at least"):
        opened(X[:64])
    assert_equal(before, [w.numpy() for w in weights])


def test_an_iterator_of_a_step_of_ones_own_needs_batch_size():
    weights = make_weights()
    python_step = step_over(weights).python_function
    data = tf.data.Dataset.from_tensor_slices(X).batch(10)

    def from_iterator(iterator):
        return python_step(next(iterator))

    with pytest.raises(tf_ooo.MemoryLimitError, match="batch_size=") as caught:
        tf_ooo.function(from_iterator, memory_limit_bytes=HUGE)(iter(data))
    assert caught.value.unknown
    step = tf_ooo.function(from_iterator, memory_limit_bytes=HUGE, batch_size=10, profile_steps=0)
    step(iter(data))
    assert step.report.predicted_peak_bytes > 0


def test_enabled_refuses_at_the_call():
    weights = make_weights()
    python_step = step_over(weights).python_function
    before = [w.numpy() for w in weights]
    with (
        pytest.raises(tf_ooo.MemoryLimitError, match="at least"),
        tf_ooo.enabled(tf_ooo.Options(memory_limit_bytes=1)),
    ):
        tf.function(python_step)(X[:8])
    assert_equal(before, [w.numpy() for w in weights])


def test_lists_of_a_loop_are_said_to_be_unknown():
    model = keras.Sequential([keras.Input((5, WIDTH)), keras.layers.LSTM(4), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    with pytest.raises(tf_ooo.MemoryLimitError, match="unroll"):
        model.fit(X.reshape(-1, 1, WIDTH).repeat(5, 1), Y, verbose=0,
                  callbacks=[tf_ooo.OOOBackprop(memory_limit_bytes=HUGE)])  # fmt: skip


def gated_model():
    """Global norm: in stock order all gradients are alive together."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(4)), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(), loss, jit_compile=False)
    return model


def test_the_stock_order_is_neither_measured_nor_kept_above_the_limit(monkeypatch):
    callback = tf_ooo.OOOBackprop(memory_limit_bytes=HUGE, profile_steps=1)
    stock = fit(gated_model(), callback)
    planned, wanted = callback.report.predicted_peak_bytes, callback.report.stock_predicted_peak_bytes
    assert planned < wanted
    runs = []
    original = controller.StepController.run

    def run(self, which, call):
        runs.append(which)
        return original(self, which, call)

    monkeypatch.setattr(controller.StepController, "run", run)
    callback = tf_ooo.OOOBackprop(memory_limit_bytes=wanted - 1, profile_steps=1)
    ours = fit(gated_model(), callback)
    assert set(runs) == {"rewritten"}
    assert callback.report.added_edges > 0
    assert "the stock order's predicted peak" in callback.report.state
    assert stock[0] == ours[0]
    assert_equal(stock[1], ours[1])


def test_a_stock_step_that_was_kept_is_left_when_larger_inputs_come():
    weights = make_weights()
    step = step_over(weights, profile_steps=1)
    step(X[:8])
    inner, ran = step._step, []
    inner.experiment.enter(controller.KeptStep(inner, "stock"))
    inner.report.change(measured_step_s=1.0)  # as if measured
    inner.stock = lambda x: ran.append(len(x))
    step(X[:8])
    before = inner.session.stock_peak_bytes
    step(X[:10])  # a new kind of input: planned first
    step(X[:10])
    assert ran == [8, 10]
    assert inner.session.stock_peak_bytes > before
    vars(inner.session)["_peaks"].stock_bytes = HUGE + 1
    step(X[:12])
    step(X[:12])
    assert ran == [8, 10]
    assert inner.choice == "rewritten"
