"""Tests which rows of an embedding are known to be the same in every micro-batch."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tf_ooo.tracing.collecting import RowsNeeded, fixed_rows


def rows_in_a_trace(make, *shape, open_rows=False):
    """Return what is known of the indices that ``make`` computes of such a batch, while it is traced."""
    found = []
    trace = tf.function(lambda x: found.append(fixed_rows(make(x), open_rows)))
    trace.get_concrete_function(tf.TensorSpec(shape, tf.int32))
    return found[0]


def beside(x):
    with tf.compat.v1.colocate_with(x.op):
        return tf.range(4) + tf.zeros([4], tf.int32)


@pytest.mark.parametrize(
    "make",
    [
        beside,
        lambda x: tf.range(4),
        lambda x: tf.reshape(tf.cast(tf.range(1, 5) - 1, tf.int64), [-1]),
        lambda x: tf.range(tf.shape(x)[1]),
        lambda x: tf.where(tf.range(-4, 0) < 0, tf.range(-4, 0) + 4, tf.range(-4, 0)),
    ],
)
def test_positions_are_known(make):
    assert list(rows_in_a_trace(make, 2, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda x: x[0], (2, 4)),
        (lambda x: 0 * x + tf.range(4), (2, 4)),
        (lambda x: tf.range(tf.shape(x)[1]), (2, None)),
        (lambda x: tf.tile(tf.range(4), [tf.shape(x)[0]]), (2, 4)),
        (lambda x: tf.random.uniform([4], 0, 9, tf.int32), (2, 4)),
        (lambda x: tf.function(lambda: tf.range(4))(), (2, 4)),
        (lambda x: tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])[0][None], (2, 4)),
    ],
)
def test_rows_that_data_may_choose_are_not(make, shape):
    """Nor those that come as often as a batch has rows, and those that are drawn."""
    assert rows_in_a_trace(make, *shape) is None


def of_many_ops(x):
    rows = tf.range(4)
    for _ in range(40):
        rows = rows + tf.zeros([4], tf.int32)
    return rows


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: tf.range(tf.shape(x)[1]), "may depend on how many a batch has"),
        (of_many_ops, "is computed by more ops than there may be"),
    ],
)
def test_a_trace_with_known_rows_might_tell(make, message):
    assert rows_in_a_trace(make, 2, None) is None
    with pytest.raises(RowsNeeded, match=message):
        rows_in_a_trace(make, 2, None, open_rows=True)
