"""Compares what each micro-batch's gradient counts with the whole batch's by hand; sums, slices, refusals."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from grappler_passes.analysis.steps import SUM_ATTR
from tf_ooo.compat import keras_compiled, versions
from tf_ooo.errors import BackendError
from tf_ooo.tracing.collecting import Collecting, added_up
from tf_ooo.tracing.intercepting import TurnsNeeded
from tf_ooo.tracing.micro_batches import FixedRows, parts_of, rows_of, split_rows


@pytest.mark.parametrize(
    ("rows", "parts", "expected"),
    [
        (8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 2, 2)), (11, 4, (3, 3, 3, 2)), (17, 5, (4, 4, 3, 3, 3)),
        (3, 8, (1, 1, 1)), (7, 1, (7,)), (1, 5, (1,)), (5, 5, (1,) * 5), (6, 5, (2, 1, 1, 1, 1)),
        (0, 3, (0,)),
    ],
)  # fmt: skip
def test_rows_of_each_micro_batch(rows, parts, expected):
    assert split_rows(rows, parts) == expected
    assert sum(expected) == rows


@pytest.mark.parametrize(
    ("rows", "weights", "scale"),
    [
        ((4,), (1,), 1),
        ((2, 2, 2, 2), (1,) * 4, 1 / 4),
        ((4, 2, 1), (1, 0.5, 0.25), 4 / 7),
        ((3, 2), (1, 2 / 3), 3 / 5),
    ],
)
def test_relative_weights(rows, weights, scale):
    split = FixedRows(rows)
    assert (split.weights, split.scale) == (weights, scale)


def test_rows_of_a_batch():
    x, y = tf.zeros((5, 3)), tf.zeros((5,), tf.int64)
    assert rows_of(x) == rows_of((x, y)) == rows_of({"a": x, "b": [y, tf.constant(2.0), None, 7]}) == 5
    assert rows_of((tf.sparse.from_dense(np.eye(4)), tf.zeros((4, 1)))) == 4
    said = "the tensors of a batch must all have as many rows, to be cut into micro-batches: "
    with pytest.raises(BackendError) as caught:
        rows_of((x, tf.zeros((4, 3)), tf.zeros((7,))))
    assert str(caught.value) == f"{said}has [4, 5, 7]"
    for empty in ((), None, tf.constant(1.0)):
        with pytest.raises(BackendError) as caught:
            rows_of(empty)
        assert str(caught.value) == f"{said}none has rows"


def test_parts_of_a_batch():
    x, y = tf.reshape(tf.range(12), (6, 2)), tf.range(10, 16)
    parts = parts_of({"x": x, "y": (y, None, tf.constant(9))}, (3, 2, 1))
    assert [part["x"].numpy().tolist() for part in parts] == [
        [[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]], [[10, 11]],
    ]  # fmt: skip
    assert [part["y"][0].numpy().tolist() for part in parts] == [[10, 11, 12], [13, 14], [15]]
    assert all(part["y"][1] is None and part["y"][2] == 9 for part in parts)
    assert parts_of(x, (6,))[0] is x


def test_parts_of_sparse_tensors():
    dense = np.arange(1, 25).reshape(4, 3, 2) * (np.arange(24).reshape(4, 3, 2) % 5 > 0)
    parts = parts_of((tf.sparse.from_dense(dense),), (1, 1, 2))
    assert [part[0].shape for part in parts] == [(1, 3, 2), (1, 3, 2), (2, 3, 2)]
    found = [tf.sparse.to_dense(part[0]).numpy() for part in parts]
    np.testing.assert_array_equal(np.concatenate(found), dense)
    np.testing.assert_array_equal(found[0], dense[:1])


UPDATE = keras_compiled.update


class Given:
    """Notes what optimizers are given in the end, in place of their update."""

    def __init__(self, monkeypatch, count=1):
        self.optimizers = [keras.optimizers.SGD(1.0) for _ in range(count)]
        self.updates = []
        self.apply = UPDATE
        monkeypatch.setattr(keras_compiled, "update", lambda *update: self.updates.append(update))

    def grads(self):
        return [grad for _, grads, _ in self.updates for grad in grads]


def traced(given, micro_batches, rows):
    """Calls ``micro_batches[n]`` in a graph for each; (the nodes of it, what they collected)."""
    split = FixedRows(rows)
    values = []

    @tf.function(autograph=False)
    def step():
        collecting = Collecting(given.optimizers, split.weights, split.scale)
        for number, micro_batch in enumerate(micro_batches):
            with collecting.micro_batch(number):
                micro_batch()
        collecting.apply()
        values.append(collecting)
        given.flat = [None if g is None else tf.convert_to_tensor(g) for g in given.grads()]
        return [g for g in given.flat if g is not None]

    concrete = step.get_concrete_function()
    return [value.numpy() for value in concrete()], concrete.graph.as_graph_def().node, values[0]


def test_the_gradient_is_the_mean_of_the_batch(monkeypatch):
    """Means of 4, 2 and 2 rows: 4 counts half, the others a quarter each."""
    given = Given(monkeypatch)
    (sgd,), variables = given.optimizers, [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    means = [([8.0, 16.0], 40.0), ([1.0, 2.0], 3.0), ([5.0, 7.0], 9.0)]

    def calls(vector, number):
        return lambda: given.apply(sgd, [tf.constant(vector), tf.constant(number)], variables)

    found, nodes, collecting = traced(given, [calls(*mean) for mean in means], (4, 2, 2))
    np.testing.assert_array_equal(found[0], [8 / 2 + 1 / 4 + 5 / 4, 16 / 2 + 2 / 4 + 7 / 4])
    assert found[1] == 40 / 2 + 3 / 4 + 9 / 4
    assert [(update[0], update[2]) for update in given.updates] == [(sgd, variables)]
    # Two sums for each variable, and no product for the first micro-batch.
    assert sum(SUM_ATTR in node.attr and node.op == "AddV2" for node in nodes) == 4
    assert sum(node.op == "Mul" for node in nodes) == 2 * (2 + 1)
    assert collecting.applied[0].collected_at == 2
    # The optimizer is itself again.
    assert not {"apply", "apply_gradients"} & vars(sgd).keys()


def test_one_micro_batch_is_left_as_it_is(monkeypatch):
    given, variable = Given(monkeypatch), tf.Variable([0.0, 0.0])
    grads = []

    def call():
        grads.append(tf.constant([1.5, 2.5]))
        given.apply(given.optimizers[0], grads, [variable])

    traced(given, [call], (5,))
    assert given.grads()[0] is grads[0]


def test_a_gradient_that_is_missing_somewhere(monkeypatch):
    """In no micro-batch it is None; in some it counts what it counts there."""
    given = Given(monkeypatch)
    variables = [tf.Variable(0.0) for _ in range(3)]
    rows = [(None, 8.0, None), (None, None, 6.0), (None, 4.0, 2.0)]

    def calls(row):
        grads = [None if value is None else tf.constant(value) for value in row]
        return lambda: given.apply(given.optimizers[0], grads, variables)

    found, _, _ = traced(given, [calls(row) for row in rows], (2, 1, 1))
    assert given.flat[0] is None
    assert found == [8 / 2 + 4 / 4, 6 / 4 + 2 / 4]


def slices(values, rows, count=6):
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([count, 1]))


def test_slices_of_different_rows_come_one_after_the_other(monkeypatch):
    given = Given(monkeypatch)
    variable = tf.Variable(np.zeros((6, 1), "f"))
    parts = [([[8.0], [4.0]], [1, 3]), ([[16.0]], [3]), ([[2.0], [6.0]], [5, 1])]

    def calls(values, rows):
        return lambda: given.apply(given.optimizers[0], [slices(values, rows)], [variable])

    found, nodes, _ = traced(given, [calls(*part) for part in parts], (4, 2, 2))
    (grad,) = given.grads()
    assert isinstance(grad, tf.IndexedSlices)
    assert grad.values.shape == (5, 1)
    assert found[0].ravel().tolist() == [0, 8 / 2 + 6 / 4, 0, 4 / 2 + 16 / 4, 0, 2 / 4]
    # Rows of their own each: what stands there is not known beforehand.
    assert sum(node.op == "PlaceholderWithDefault" for node in nodes) == 3
    assert sum(SUM_ATTR in node.attr and node.op == "ConcatV2" for node in nodes) == 2


def test_slices_of_the_same_rows_are_added_up(monkeypatch):
    """The rows are like positions: each once, in every micro-batch. A row that comes twice is no position."""
    given = Given(monkeypatch)
    variable = tf.Variable(np.zeros((6, 1), "f"))

    def found_for(rows, others):
        given.updates.clear()
        parts = [([[8.0], [4.0]], rows), ([[16.0], [12.0]], others), ([[20.0], [24.0]], rows)]

        def calls(values, rows):
            return lambda: given.apply(given.optimizers[0], [slices(values, rows)], [variable])

        return traced(given, [calls(*part) for part in parts], (4, 2, 2))[0][0].ravel().tolist()

    assert found_for([1, 3], [1, 3]) == [0, 4 + 4 + 5, 0, 2 + 3 + 6, 0, 0]
    assert given.grads()[0].values.shape == (2, 1)
    assert found_for([1, 3], [3, 1]) == [0, 4 + 3 + 5, 0, 2 + 4 + 6, 0, 0]
    assert given.grads()[0].values.shape == (4, 1)
    assert found_for([2, 2], [2, 2]) == [0, 0, 4 + 2 + 4 + 3 + 5 + 6, 0, 0, 0]
    assert given.grads()[0].values.shape == (6, 1)


def test_rows_that_data_choose_are_never_added_up(monkeypatch):
    """The first micro-batch's are not known: later ones that are known do not join them."""
    given = Given(monkeypatch)
    variable = tf.Variable(np.zeros((6, 1), "f"))

    def call(rows):
        grad = tf.IndexedSlices(tf.constant([[8.0], [4.0]]), rows(), tf.constant([6, 1]))
        given.apply(given.optimizers[0], [grad], [variable])

    drawn = tf.Variable([1, 3])
    known = [lambda: drawn.read_value(), lambda: tf.constant([1, 3]), lambda: tf.constant([1, 3])]
    found, _, _ = traced(given, [lambda r=rows: call(r) for rows in known], (2, 2, 2))
    assert given.grads()[0].values.shape == (6, 1)
    np.testing.assert_allclose(found[0].ravel(), [0, 8, 0, 4, 0, 0], rtol=1e-6)


def test_dense_for_some_and_slices_for_others(monkeypatch):
    given = Given(monkeypatch)
    variable = tf.Variable(np.zeros((3, 1), "f"))
    grads = [
        lambda: tf.constant([[8.0], [4.0], [0.0]]),
        lambda: slices([[16.0]], [2], 3),
        lambda: tf.constant([[12.0], [0.0], [4.0]]),
    ]
    calls = [lambda g=grad: given.apply(given.optimizers[0], [g()], [variable]) for grad in grads]
    found, _, _ = traced(given, calls, (4, 2, 2))
    assert found[0].ravel().tolist() == [8 / 2 + 12 / 4, 2, 16 / 4 + 4 / 4]


def test_slices_of_one_micro_batch_stay(monkeypatch):
    given, variable = Given(monkeypatch), tf.Variable(np.zeros((6, 1), "f"))
    grad = []

    def call():
        grad.append(slices([[8.0]], [2]))
        given.apply(given.optimizers[0], grad, [variable])

    found, _, _ = traced(given, [call], (3,))
    assert isinstance(given.grads()[0], tf.IndexedSlices)
    assert given.grads()[0].values is grad[0].values
    assert found[0].ravel().tolist() == [0, 0, 8, 0, 0, 0]


def test_two_optimizers_in_the_order_of_the_first_micro_batch(monkeypatch):
    given = Given(monkeypatch, 2)
    first, second = given.optimizers
    variables = tf.Variable(0.0), tf.Variable(0.0)

    def call():
        given.apply(second, [tf.constant(2.0)], [variables[1]])
        given.apply(first, [tf.constant(6.0)], [variables[0]])

    found, _, collecting = traced(given, [call, call], (1, 1))
    assert [(update[0], update[2]) for update in given.updates] == [
        (second, [variables[1]]),
        (first, [variables[0]]),
    ]
    assert found == [2, 6]
    assert [applied.collected_at for applied in collecting.applied] == [1, 2]


@pytest.mark.skipif(versions.is_keras_2(keras), reason="apply of Keras 3")
def test_variables_that_were_not_named_are_not_named(monkeypatch):
    given = Given(monkeypatch)
    (sgd,) = given.optimizers
    sgd.build([tf.Variable(0.0)])

    def call():
        sgd.apply([tf.constant(2.0)])

    assert traced(given, [call, call], (1, 1))[0] == [2]
    assert [update[2] for update in given.updates] == [None]


def refused(monkeypatch, *micro_batches, count=1):
    given = Given(monkeypatch, count)
    variable = tf.Variable(0.0)

    def call(numbers):
        for number in numbers:
            grads = [tf.constant(1.0)] * (2 if number < 0 else 1)
            given.apply(given.optimizers[abs(number) - 1], grads, [variable] * len(grads))

    with pytest.raises((BackendError, TurnsNeeded)) as caught:
        traced(given, [lambda n=numbers: call(n) for numbers in micro_batches], (1,) * len(micro_batches))
    return str(caught.value)


def test_what_does_not_fit_the_first_micro_batch_is_refused(monkeypatch):
    twice = "train_step applies gradients twice with one optimizer"  # it is traced in turns
    assert refused(monkeypatch, [1, 1]) == twice
    assert refused(monkeypatch, [2, 1, 2], count=2) == twice
    other = "train_step applies other gradients for a later micro-batch than for the first"
    assert refused(monkeypatch, [1], [1, 2], count=2) == other
    assert refused(monkeypatch, [1], [-1]) == other
    assert refused(monkeypatch, [-1], [1]) == other
    times = "train_step applies gradients {} times for the first micro-batch and {} times for another"
    assert refused(monkeypatch, [1], []) == times.format(1, 0)
    assert refused(monkeypatch, [1, 2], [1, 2], [1], count=2) == times.format(2, 1)


def test_sums_of_replicas_are_added_up():
    sums = [tf.constant(value) for value in (1.0, 2.0, 4.0)]
    assert [float(added_up(sums[:count], "CPU:0")) for count in (1, 2, 3)] == [1, 3, 7]
