"""Batches of any number of rows are divided as those whose number is known."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ooo.tracing.micro_batches import (
    OWN_TRACES,
    BatchesSeen,
    Division,
    FixedRows,
    OpenRows,
    open_batch,
    parts_of,
    split_rows,
)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_numbers_and_parts(count):
    @tf.function(
        input_signature=[(tf.TensorSpec([None, 2]), {"y": tf.TensorSpec([None])}, tf.TensorSpec([]))]
    )
    def divided(batch):
        split = OpenRows(batch, count)
        numbers = range(split.count)
        weights = tf.stack([tf.cast(weight, tf.float64) for weight in split.weights])
        shares = tf.stack([split.share(number) for number in numbers])
        return weights, tf.cast(split.scale, tf.float64), shares, [split.part(batch, n) for n in numbers]

    for rows in range(count, 12):
        fixed = FixedRows(split_rows(rows, count))
        x = tf.reshape(tf.range(2.0 * rows), (rows, 2))
        batch = x, {"y": tf.range(float(rows))}, tf.constant(3.0)
        weights, scale, shares, parts = divided(batch)
        assert weights.numpy().tolist() == list(fixed.weights), "in float64, as Python calculates"
        assert scale.numpy() == fixed.scale
        assert shares.numpy().tolist() == [np.float32(fixed.share(number)) for number in range(count)]
        expected = parts_of(batch, split_rows(rows, count))
        for part, other in zip(parts, expected, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, part, other)


def test_which_batches_may_be_of_any_size():
    x, y = tf.zeros([5, 3]), tf.zeros([5], tf.int64)
    four = Division(4)
    opened = open_batch((x, {"y": y}), four)
    assert opened.spec == (tf.TensorSpec([None, 3]), {"y": tf.TensorSpec([None], tf.int64)})
    assert opened.key == open_batch((x[:4], {"y": y[:4]}), four).key
    assert opened.key != open_batch((x[:, :2], {"y": y}), four).key
    assert open_batch((x, y), Division(6)) is None, "fewer rows than micro-batches"
    assert open_batch((x, y), Division(1)) is None
    assert open_batch((x, None), four) is None
    assert open_batch((tf.sparse.from_dense(x), y), four) is None


def test_the_first_kinds_have_traces_of_their_own():
    seen = BatchesSeen()
    kinds = range(OWN_TRACES + 2)
    assert [seen.has_own_trace(kind) for kind in kinds] == [True] * OWN_TRACES + [False] * 2
    assert [seen.has_own_trace(kind) for kind in kinds] == [True] * OWN_TRACES + [False] * 2
