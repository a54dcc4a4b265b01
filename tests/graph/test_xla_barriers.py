"""Tests which barriers on activations are worth what they cost: by formulas, for a published device."""

from __future__ import annotations

import pytest
import tensorflow as tf

from grappler_passes.compat import shape_inference
from tf_ooo.costs.devices import DeviceModel
from tf_ooo.modes.compiled.barriers import cost_s, gain_s, is_worth_it
from tf_ooo.modes.compiled.outline import Call
from tf_ooo.modes.compiled.regions import FlatStep, Region

# A launch takes 10 us, memory 1 GB/s; products cost 1 Gflop/s.
SLOW = DeviceModel(flop_per_s=1e9, bytes_per_s=1e9, launch_s=1e-5)


@pytest.fixture(scope="module")
def step():
    """relu -> (tanh, tanh, dW); product -> tanh; relu2 -> product."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (250, 1000), name="x")
        a = tf.nn.relu(x, name="a")
        fetched = [tf.tanh(a, name="t1"), tf.tanh(a, name="t2")]
        fetched.append(tf.linalg.matmul(a, x, transpose_a=True, name="dW"))
        p = tf.identity(tf.linalg.matmul(x, x, transpose_b=True, name="product"), name="p")
        fetched.append(tf.tanh(p, name="t3"))
        b = tf.nn.relu(p, name="b")
        fetched.append(tf.linalg.matmul(b, b, name="square"))
    graph_def = graph.as_graph_def()
    return FlatStep(
        graph_def, shape_inference.infer_some_outputs(graph_def), [tensor.name for tensor in fetched]
    )


def call(name, *inputs):
    region = Region((name,), (name,), tuple((i, 0) for i in inputs), ((name, 0),))
    return Call(f"ooo_{name}", region, 1)


def test_what_would_have_been_merged_costs_a_kernel_and_memory(step):
    """1 MB is written once and read by two: 3 ms, and a launch."""
    assert cost_s(step, ("a", 0), ["t1", "t2"], SLOW) == pytest.approx(3e-3 + 1e-5)


@pytest.mark.parametrize(("name", "readers"), [("p", ["t3"]), ("b", ["square"]), ("a", [])])
def test_what_is_in_memory_anyway_costs_nothing(step, name, readers):
    assert cost_s(step, (name, 0), readers, SLOW) == 0.0


def test_a_long_weight_gradient_is_worth_it_and_a_short_one_is_not(step):
    calls = [call("dW", "a", "x")]
    assert gain_s(step, ("a", 0), calls, SLOW) == pytest.approx(2 * 250 * 1000 * 1000 / 1e9 + 1e-5)
    assert is_worth_it(step, ("a", 0), ["t1", "t2"], calls, SLOW)
    fast = DeviceModel(flop_per_s=1e15, bytes_per_s=1e9, launch_s=0.0)
    assert gain_s(step, ("a", 0), calls, fast) > 0  # it reads and writes 6 MB: still worth 3
    assert is_worth_it(step, ("a", 0), ["t1"] * 4, calls, fast)
    assert not is_worth_it(step, ("a", 0), ["t1"] * 9, calls, fast)


def test_calls_that_do_not_read_it_gain_nothing(step):
    assert gain_s(step, ("a", 0), [call("square", "b")], SLOW) == 0.0
    assert not is_worth_it(step, ("a", 0), ["t1"], [call("square", "b")], SLOW)
