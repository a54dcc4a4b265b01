"""tf_ooo.function and tf_ooo.enabled: the same bits as the stock step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tf_ooo
from tests.same_bits import assert_ordered

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def make(decorate):
    weights = [tf.Variable(np.full(shape, 0.1, "float32")) for shape in ((6, 5), (5, 4), (4, 1))]

    def step(x):
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean((value - 1.0) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return decorate(step), weights


def run(decorate, steps=20):
    step, weights = make(decorate)
    losses = [step(tf.constant(X)).numpy() for _ in range(steps)]
    return losses, [weight.numpy() for weight in weights], step


def assert_equal(one, two):
    assert one[0] == two[0]
    for a, b in zip(one[1], two[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_function_is_bit_equal_and_reports():
    ours = run(tf_ooo.function(schedule="fast_forward", strict=True))
    assert_equal(run(tf.function), ours)
    assert ours[2].report.schedule == "fast_forward"
    assert ours[2].report.stock_step_s > 0
    assert_ordered(ours[2].report)


@pytest.mark.parametrize(
    "decorate",
    [tf_ooo.function(jit_compile=True), lambda f: tf_ooo.function(tf.function(f, jit_compile=True))],
)
def test_jit_compile_runs_stock_and_says_so(decorate):
    step = run(decorate, steps=2)[2]
    assert "jit_compile" in step.report.fallback_reason


def test_batches_of_two_sizes_are_compared_with_their_like():
    """Every other call gets a short batch: each order runs on both sizes."""
    step, _ = make(tf_ooo.function(compare=True))
    for size in (8, 3) * 20:
        step(tf.constant(X[:size]))
    times = step._step.comparison.times
    assert times.done
    assert [sorted(turns) for turns in times._rounds[0]._runs.values()] == [["rewritten", "stock"]] * 2


def test_a_tf_function_keeps_its_signature():
    traces = []

    def decorate(step):
        def counted(x):
            traces.append(x.shape)
            return step(x)

        function = tf.function(counted, input_signature=[tf.TensorSpec((None, 6))])
        return tf_ooo.function(function, profile_steps=0, strict=True)

    step, _ = make(decorate)
    step(X)
    step(X[:3])
    assert [shape.as_list() for shape in traces] == [[None, 6]]


def test_a_trace_made_after_enabled_runs_in_stock_order():
    """This is documented: a trace made inside stays rewritten, another shape later is not."""
    stock, weights = make(tf.function)
    ours, own_weights = make(tf.function)
    with tf_ooo.enabled(tf_ooo.Options(strict=True)) as report:
        ours(tf.constant(X))
    stock(tf.constant(X))
    planned = report.rewritten_graph
    for x in (X[:3], X):
        assert stock(tf.constant(x)).numpy() == ours(tf.constant(x)).numpy()
    assert report.rewritten_graph is planned
    assert_ordered(report)
    assert_equal(([], weights), ([], own_weights))


def test_enabled_is_bit_equal():
    stock = run(tf.function)
    with tf_ooo.enabled(tf_ooo.Options(strict=True)) as report:
        ours = run(tf.function)
    assert_equal(stock, ours)
    assert_ordered(report)


def test_classify_and_plan_of_a_concrete_function():
    step, weights = make(tf.function)
    graph = tf_ooo.classify(step.get_concrete_function(tf.constant(X)))
    assert len(graph.layers) == len(weights)
    schedule = tf_ooo.plan(graph, schedule="fast_forward")
    assert tf_ooo.Schedule.from_text(schedule.to_text()) == schedule
    with pytest.raises(tf_ooo.MemoryLimitError, match="at least"):
        tf_ooo.plan(graph, memory_limit_bytes=1)


def test_what_a_tf_function_has_it_has():
    step, _ = make(tf_ooo.function(schedule="fast_forward"))
    concrete = step.get_concrete_function(tf.constant(X))
    assert tf_ooo.classify(concrete).layers
    assert step.experimental_get_tracing_count() == 1
    for size in (8, 8, 3):
        step(tf.constant(X[:size]))
    assert step.experimental_get_tracing_count() == 2


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(np.full((6, 1), 0.1, "float32"))

    @tf_ooo.function(schedule="fast_forward")
    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.weight - 1.0) ** 2)
        self.weight.assign_sub(0.1 * tape.gradient(loss, self.weight))
        return loss


def test_a_module_says_what_it_does_not_save(tmp_path, caplog):
    module, x = Module(), tf.constant(X)
    for _ in range(3):
        module.step(x)
    assert caplog.text.count("Module.step is not saved with its module") == 1
    module.saved_step = module.step.stock
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert float(loaded.saved_step(x)) == float(module.step(x))


def test_a_step_in_which_nothing_can_be_moved_says_so():
    weight = tf.Variable(np.full((6, 6), 0.1, "float32"))

    @tf_ooo.function(schedule="fast_forward")
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weight - 1.0) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    step(tf.constant(X))
    assert step.report.moved_ops == 0
    assert "no op could be moved" in step.report.summary()


def test_not_a_training_graph():
    square = tf.function(lambda x: x * x).get_concrete_function(tf.constant(1.0))
    with pytest.raises(tf_ooo.GraphError):
        tf_ooo.classify(square)
