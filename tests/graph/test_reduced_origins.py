"""Tests where gradients come from, in graphs whose variables are given what was read of them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tf_ooo.tracing.averaging import OWN, Origins


def origin_of(body, *inputs):
    """Return the origin of what the body returns, asked while it is traced."""
    said = []

    @tf.function(input_signature=[tf.TensorSpec([2]) for _ in inputs])
    def step(*inside):
        said.append(Origins().gradient(body(*inside)))
        return 0.0

    step.get_concrete_function()
    return said[-1]


@pytest.mark.parametrize("turns", [1, 3])
def test_a_seed_that_counts_itself_up(turns):
    """A Dropout layer's seed is like this: the read value is assigned again, plus one."""
    seed = tf.Variable(1.0)

    def counted(x):
        drawn = 0.0
        for _ in range(turns):
            drawn += seed.read_value()
            seed.assign(seed.read_value() + 1.0)
        return drawn * tf.ones(2)

    assert origin_of(counted, 1) == 0
    assert origin_of(lambda x: counted(x) * x, 1) == OWN


def test_what_goes_round_in_two_variables_is_seen_in_both():
    """Only the second is given this rank's data: the first has them by way of it."""
    first, second = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])

    def around(x):
        first.assign(second.read_value())
        second.assign(first.read_value() + x)
        return first.read_value()

    assert origin_of(around, 1) == OWN


@pytest.mark.parametrize("where", ["function", "condition"])
def test_a_variable_given_what_was_computed_of_it_in_a_called_function(where):
    """The function's result depends on what is assigned outside of it, which depends on the result."""
    state = tf.Variable([0.0, 0.0])
    double = tf.function(lambda: 2.0 * state.read_value(), autograph=False)

    def read(x):
        if where == "function":
            return double()
        return tf.cond(x[0] > 0.0, state.read_value, double)

    def stepped(x, more):
        result = read(x)
        state.assign(result + more)
        return read(x)

    assert origin_of(lambda x: stepped(x, 1.0), 1) == 0
    assert origin_of(lambda x: stepped(x, x), 1) == OWN


def test_each_call_of_a_function_is_told_apart():
    double = tf.function(lambda x: 2.0 * x, autograph=False)
    assert origin_of(lambda x: (double(tf.ones(2)), double(x))[1], 1) == OWN
    assert origin_of(lambda x: (double(x), double(tf.ones(2)))[1], 1) == 0
