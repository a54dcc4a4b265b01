"""Compiled functions: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.zoo import needs_xla_streams
from tf_ooo.compat import tf_functions, xla


@needs_xla_streams
def test_asking_for_hlo_draws_no_random_numbers():
    """TensorFlow finds out the device by drawing one, where it is not told."""
    spec = tf.TensorSpec((2,))
    run = tf_functions.plain_function(lambda x: x * 2.0, [spec], compiled=True)
    drawn = []
    for asks in (False, True):
        tf.random.set_seed(3)
        if asks:
            assert "multiply" in xla.hlo_of(run, [spec])
        shuffled = tf.data.Dataset.range(20).shuffle(20)
        drawn.append((tf.random.normal(()).numpy(), [int(number) for number in shuffled]))
    assert drawn[0] == drawn[1]


def test_run_errors_are_exceptions():
    assert all(issubclass(error, Exception) for error in xla.run_errors())


@needs_xla_streams
def test_repeated_function():
    """All rounds are in one loop of known length, none is left out."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (2, 2), name="x")
        tf.linalg.matmul(x, x, name="square")
    specs = {"x:0": tf.TensorSpec((2, 2))}
    run = xla.repeated_function(graph.as_graph_def(), specs, ["square:0"], 5)
    np.testing.assert_array_equal(run(tf.ones((2, 2)))[0], np.full((2, 2), 2.0))
    hlo = xla.hlo_of(run, list(specs.values()), "optimized_hlo")
    assert hlo.count("while(") == 1
    assert "opt-barrier" in xla.hlo_of(run, list(specs.values()))
    assert xla.stream_calls(hlo) == []
