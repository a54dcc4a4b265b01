"""A value that is written to a variable on a worker is there when a function reads it."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.distributed.clusters import addresses, join, workers

pytestmark = [pytest.mark.alone, pytest.mark.takes(15)]
TURNS, VARIABLES = 200, 8


def test_a_function_does_not_overtake_what_was_written():
    """As TensorFlow streams writes, half of the turns go wrong: metrics kept what was before their reset."""
    cluster = addresses(2)
    with workers(cluster, [1]):
        joined = join(cluster)
        with tf.device(joined.devices[1]):
            variables = [tf.Variable(0.0) for _ in range(VARIABLES)]

        @tf.function
        def count():
            for variable in variables:
                variable.assign_add(1.0)
            return tf.stack([variable.read_value() for variable in variables])

        for _ in range(TURNS):
            for variable in variables:
                variable.assign(0.0)
            assert count().numpy().tolist() == [1.0] * VARIABLES
