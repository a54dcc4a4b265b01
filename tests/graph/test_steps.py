"""Steps as they are called: random state, threads, new shapes, and what strict raises when."""

from __future__ import annotations

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests import zoo
from tf_ooo.compat import tf_functions
from tf_ooo.tracing import traces

RNG = np.random.default_rng(0)


def make_step(**options):
    """A step over two layers for any number of rows, a trace for each."""
    weights = [tf.Variable(np.full(shape, 0.1, "float32")) for shape in ((6, 5), (5, 4))]

    def step(x):
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean((value - 1.0) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return tf_ooo.function(step, **options)


def rows(count):
    return tf.constant(RNG.normal(size=(count, 6)).astype("float32"))


class Noise(keras.layers.Layer):
    """Its function is traced once, by whoever comes first."""

    @tf.function
    def call(self, x):
        return x + 0.1 * tf.random.normal(tf.shape(x))


def noisy(warm_up):
    """A model whose ``Noise`` has been traced before ``fit``."""

    def build():
        model = keras.Sequential([keras.Input((7,)), Noise(), keras.layers.Dense(9), keras.layers.Dense(3)])
        if warm_up == "predict":
            model.predict(zoo.features(7), batch_size=3, verbose=0)
        return model, zoo.features(7), zoo.labels()

    return build


def fitted(warm_up, fits):
    model, x, y = zoo.compiled(noisy(warm_up))
    losses = []
    for callbacks in fits:
        history = model.fit(x, y, batch_size=3, epochs=4, verbose=0, callbacks=callbacks)
        losses += history.history["loss"]
    return losses, model.get_weights()


@pytest.mark.parametrize("case", ["traced by predict", "fit before", "new callback", "same callback"])
def test_random_state_that_others_have_begun_stays_with_the_stock_step(case):
    """No function of the stock step is traced while it is profiled."""
    ours = [tf_ooo.OOOBackprop(compare=True) for _ in range(2)]
    fits = {
        "traced by predict": [[ours[1]]],
        "fit before": [[], [ours[1]]],
        "new callback": [[ours[0]], [ours[1]]],
        "same callback": [[ours[1]], [ours[1]]],
    }[case]
    warm_up = "predict" if case == "traced by predict" else None
    stock, rewritten = fitted(warm_up, [[]] * len(fits)), fitted(warm_up, fits)
    assert stock[0] == rewritten[0]
    for a, b in zip(stock[1], rewritten[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert "draws random numbers" in ours[1].report.fallback_reason


def test_random_state_counts_without_profiling_too():
    ours = tf_ooo.OOOBackprop(profile_steps=0)
    assert fitted(None, [[], []])[0] == fitted(None, [[], [ours]])[0]
    assert "draws random numbers" in ours.report.fallback_reason


def test_several_threads():
    step, errors = make_step(compare=True), []

    def work():
        try:
            for _ in range(15):
                step(rows(4))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # A call during which another thread traced is no sample: on a busy machine a few more are needed.
    for _ in range(60):
        if not step.report.undecided and step.report.measured_step_s is not None:
            break
        step(rows(4))
    assert step.report.measured_step_s > 0
    assert not step.report.undecided


def test_steps_that_trace_are_not_timed():
    step = make_step(compare=True)
    for count in (4, 4, 5, 5, 6, 6, 7, 7):
        step(rows(count))
    assert step.report.state == "not decided, 8 of at most 40 steps compared"
    assert step.report.measured_step_s is None
    for _ in range(40 - 8):
        step(rows(4))
    assert step.report.measured_step_s > 0


def test_options_for_xla_are_named():
    step = make_step(streams=2)
    step(rows(4))
    assert "streams=2: no effect without jit_compile=True" in step.report.notes
    with tf_ooo.enabled(tf_ooo.Options(any_platform=True)) as report:
        pass
    assert report.notes == ["any_platform=True: no effect without jit_compile=True"]


def test_only_the_largest_of_the_plans_is_kept():
    step = make_step(schedule="fast_forward", profile_steps=0, strict=True)
    step(rows(2))
    first = step.report.rewritten_graph
    for count in range(3, 9):
        step(rows(count))
    session = step._step.session
    assert session._peaks.open == []
    assert session.result.graph_def is step.report.rewritten_graph
    assert step.report.rewritten_graph is not first


@contextlib.contextmanager
def run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@contextlib.contextmanager
def without_grappler():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.parametrize(
    ("switch", "why"),  # Keras 2 says of a model that it runs eagerly where all functions do
    [(run_eagerly, "run_functions_eagerly|run_eagerly=True"), (without_grappler, "switched off")],
)
@pytest.mark.parametrize("how", ["fit", "function"])
def test_strict_raises_where_tensorflow_hands_no_graph_over(switch, why, how):
    def train():
        if how == "function":
            make_step(strict=True)(rows(4))
        else:
            model, x, y = zoo.compiled(zoo.one_layer)
            model.fit(x, y, verbose=0, callbacks=[tf_ooo.OOOBackprop(strict=True)])

    with switch(), pytest.raises(tf_ooo.GraphError, match=why):
        train()


def test_a_step_without_variables_is_no_training_step():
    square = tf_ooo.function(lambda x: x @ x, compare=True)
    for _ in range(3):
        square(tf.eye(3))
    assert "captures no variables" in square.report.fallback_reason
    with pytest.raises(tf_ooo.GraphError, match="not a training graph.*captures no variables"):
        tf_ooo.function(lambda x: x @ x, strict=True)(tf.eye(3))


def test_strict_raises_at_the_first_call_of_an_inference_function():
    weight = tf.Variable(tf.ones((3, 3)))
    with pytest.raises(tf_ooo.GraphError, match="not a training graph"):
        tf_ooo.function(lambda x: x @ weight, strict=True)(tf.eye(3))


def fails_from(number, monkeypatch):
    """The order pass raises from its ``number``th run on."""
    from grappler_passes.passes.rewrite_plan import OrderPass

    run, calls = OrderPass.run, []

    def late(self, graph_def, training_graph):
        calls.append(1)
        if len(calls) >= number:
            raise ValueError("late boom")
        return run(self, graph_def, training_graph)

    monkeypatch.setattr(OrderPass, "run", late)
    return calls


def batches():
    """Rows of two sizes, fixed: the change makes TensorFlow trace again in mid-training."""
    return [rows(count) for count in (4, 4, 4, 8, 8, 4, 8)]


def test_a_pass_that_fails_on_a_retrace(monkeypatch, caplog):
    stock, ours = make_step(profile_steps=0), make_step(schedule="fast_forward", profile_steps=0)
    data = batches()
    expected = [stock.python_function(x).numpy() for x in data]
    calls = fails_from(2, monkeypatch)
    losses = [ours(x).numpy() for x in data]
    assert len(calls) == 2
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert "late boom" in ours.report.fallback_reason
    said = [record for record in caplog.records if "late boom" in record.getMessage()]
    assert [record.exc_info for record in said] == [None]


def test_a_pass_that_fails_on_a_retrace_raises_if_strict(monkeypatch):
    step = make_step(schedule="fast_forward", profile_steps=0, strict=True)
    fails_from(2, monkeypatch)
    step(rows(4))
    with pytest.raises(tf_ooo.PassError, match="late boom"):
        step(rows(8))


def test_a_timeline_is_written_once_it_is_decided(tmp_path):
    step = make_step(compare=True, timeline=tmp_path / "function")
    step(rows(4))
    assert not (tmp_path / "function").exists()
    for _ in range(40):
        step(rows(4))
    assert "Out-of-order" in (tmp_path / "function" / "report.html").read_text()
    with tf_ooo.enabled(tf_ooo.Options(timeline=tmp_path / "enabled")):
        tf.function(make_step().python_function)(rows(4))
    assert (tmp_path / "enabled" / "trace.json").exists()


def test_bad_input_is_an_options_error():
    for bad in ("auto", {"mode": "auto"}):
        with pytest.raises(tf_ooo.OptionsError, match="Options"):
            tf_ooo.enabled(bad)
    with pytest.raises(tf_ooo.OptionsError, match="profile_steps=5"):
        tf_ooo.enabled(tf_ooo.Options(profile_steps=5))
    with pytest.raises(tf_ooo.OptionsError, match="compare=True"):
        tf_ooo.enabled(tf_ooo.Options(compare=True))
    with pytest.raises(tf_ooo.OptionsError, match="schedule='fast_forward'"):
        tf_ooo.function("fast_forward")
    with pytest.raises(tf_ooo.OptionsError, match="got 3"):
        tf_ooo.function(3)
    with pytest.raises(tf_ooo.OptionsError, match="got 3"):
        tf_ooo.function(schedule="auto")(3)
    with pytest.raises(tf_ooo.OptionsError, match="layers="):
        tf_ooo.plan(None)
    with pytest.raises(tf_ooo.GraphError, match="classify"):
        tf_ooo.plan(tf.compat.v1.GraphDef())


class TestTraces:
    """tf_ooo/tracing/traces.py, compat/tf_functions.py: what breaks if TensorFlow or Keras change."""

    def test_keras_train_function_closes_over_a_tf_function(self):
        model, x, y = zoo.compiled(zoo.one_layer)
        model.make_train_function()
        assert tf_functions.functions_of(model.train_function), "random state in fit is no longer found"
        data = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(3))
        traces.trace(model.train_function, (data,), {})
        count = traces.trace_count(model.train_function)
        model.train_function(data)
        assert traces.trace_count(model.train_function) == count > 0
        assert len(list(data)) == 1, "tracing took an element"

    def test_the_call_uses_the_trace(self):
        function = tf.function(lambda x, k=1: x * k)
        traces.trace(function, (np.ones(3, "float32"),), {"k": 3})
        function(np.ones(3, "float32"), k=3)
        assert traces.trace_count(function) == 1

    def test_looking_for_random_state_traces_nothing(self):
        function = tf.function(lambda x: x, input_signature=[tf.TensorSpec((None,))])
        assert traces.random_state(function) == ""
        assert traces.trace_count(function) == 0

    def test_random_state_in_functions_traced_before(self):
        inner = tf.function(lambda x: x + tf.random.normal(tf.shape(x)))
        inner(tf.ones(3))
        outer = tf.function(lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: x))
        assert traces.random_state(outer) == ""
        traces.trace(outer, (tf.ones(3),), {})
        assert "RandomStandardNormal draws random numbers" in traces.random_state(outer)
