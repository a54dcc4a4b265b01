"""Tests how often loops run, and what that makes of calculated costs."""

from __future__ import annotations

import pytest
import tensorflow as tf
from graphs import flat

from grappler_passes.graph.sizes import iterations_of_ops
from tf_ooo.costs.devices import device
from tf_ooo.costs.profile import op_seconds

ROWS, WIDTH = 64, 32


def products(steps, begin=0):
    """The graph of so many products in a loop and one behind it, and of their gradient."""

    def train(x, weight, *count):
        limit = count[0] if count else steps
        with tf.GradientTape() as tape:
            tape.watch(weight)
            _, x = tf.while_loop(
                lambda i, x: i < limit, lambda i, x: (i + 1, tf.tanh(x @ weight)), (tf.constant(begin), x)
            )
            loss = tf.reduce_sum(x @ weight)
        return tape.gradient(loss, weight)

    specs = [
        tf.TensorSpec((ROWS, WIDTH)),
        tf.TensorSpec((WIDTH, WIDTH)),
        *([] if steps else [tf.TensorSpec((), tf.int32)]),
    ]
    return flat(tf.function(train), *specs)[0]


def of_products(graph_def):
    names = {node.name for node in graph_def.node if node.op == "MatMul"}
    times = iterations_of_ops(graph_def)
    return sorted(times[name] for name in names & times.keys()), len(names)


@pytest.mark.parametrize(("steps", "begin"), [(5, 0), (12, 0), (12, 4)])
def test_a_loop_and_its_gradient(steps, begin):
    times, count = of_products(products(steps, begin))
    assert set(times) == {steps - begin}
    assert len(times) == 3  # one forward, two backward; those outside are in no loop
    assert count == 6


def test_a_number_that_is_not_in_the_graph():
    assert of_products(products(0)) == ([], 6)


def test_two_loops_in_one_another():
    def function(x):
        def outer(i, x):
            return i + 1, tf.while_loop(lambda j, x: j < 3, lambda j, x: (j + 1, tf.sin(x)), (0, x))[1]

        return tf.while_loop(lambda i, x: i < 5, outer, (0, tf.cos(x)))[1]

    graph_def = flat(tf.function(function), tf.TensorSpec((3,)))[0]
    times = iterations_of_ops(graph_def)
    (sine,) = (node.name for node in graph_def.node if node.op == "Sin")
    assert times[sine] == 15
    assert not any(node.name in times for node in graph_def.node if node.op == "Cos")


def test_calculated_seconds_count_all_iterations():
    def seconds_of_loop(steps):
        graph_def = products(steps)
        seconds, times = op_seconds(graph_def, device("cpu-core")).seconds, iterations_of_ops(graph_def)
        matmuls = [node.name for node in graph_def.node if node.op == "MatMul" and node.name in times]
        return sum(seconds[name] for name in matmuls)

    assert seconds_of_loop(12) == pytest.approx(3 * seconds_of_loop(4))
