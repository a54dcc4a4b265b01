"""Tells whether a step that is traced again is the one that was traced before."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests import zoo
from tf_ooo.compat import train_function
from tf_ooo.tracing import traces


class Step:
    """A step whose loop, condition and inner function read a number in Python."""

    def __init__(self):
        self.factor, self.weight, self.table = 2.0, tf.Variable([1.0, 2.0]), tf.constant([3.0, 4.0])

    def step(self, x):
        inner = tf.function(lambda value: value * self.factor)
        looped = tf.while_loop(lambda i, _: i < 3, lambda i, value: (i + 1, inner(value)), (0, x))[1]
        self.weight.assign_add(tf.cond(tf.reduce_sum(x) > 0, lambda: looped, lambda: x) + self.table)
        return self.weight.read_value()


def changed(step):
    step.factor = 3.0


def another_variable(step):
    step.weight = tf.Variable([1.0, 2.0])


def another_constant(step):
    step.table = tf.constant([3.0, 5.0])


def an_equal_constant(step):
    step.table = tf.constant([3.0, 4.0])


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        (None, False),
        (changed, True),
        (another_variable, True),
        (another_constant, True),
        (an_equal_constant, False),
    ],
)
def test_what_is_read_in_python_counts(change, differ):
    step, x = Step(), (tf.constant([1.0, 1.0]),)
    first, again = tf.function(step.step), tf.function(step.step)
    first.get_concrete_function(*x)
    if change is not None:
        change(step)
    assert traces.differ(first, again, x, {}) is differ


def test_what_is_no_tf_function_is_not_looked_at():
    assert not traces.differ(lambda: 1, lambda: 2, (), {})


@pytest.mark.parametrize("name", zoo.SMALL)
def test_models_trace_alike(name):
    """Keras and TensorFlow number some things anew in each trace, which is no difference."""
    model, x, y = zoo.compiled(zoo.SMALL[name])
    stock = train_function.train_function_of(model)
    batches = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(3))
    assert not traces.differ(stock, train_function.new_train_function(model), (batches,), {})
