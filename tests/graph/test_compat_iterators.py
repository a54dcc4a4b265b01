"""Iterators over data sets: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tf_ooo.compat import train_function


def test_is_iterator():
    data = tf.data.Dataset.range(3)
    assert train_function.is_iterator(iter(data))
    assert not train_function.is_iterator(data)
    assert not train_function.is_iterator(iter([1]))


def test_take():
    iterator = iter(tf.data.Dataset.range(3))
    assert [int(value) for value in train_function.take(iterator, 2)] == [0, 1]
    assert [int(value) for value in train_function.take(iterator, 2)] == [2], "take lost an element"


def test_iterator_over():
    data = tf.data.Dataset.from_tensor_slices(np.arange(7.0)).batch(4)
    iterator = iter(data)
    total = tf.function(lambda it: tf.reduce_sum(next(it)))
    again = train_function.iterator_over(train_function.take(iterator, 2), iterator)
    assert [float(total(again)), float(total(again))] == [6.0, 15.0]
    total(iter(data))
    assert total.experimental_get_tracing_count() == 1, "the first batch would run in a trace of its own"
