"""Nests of tensors: what an upgrade breaks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.zoo import keras
from tf_ooo.compat import nests
from tf_ooo.compat.nests import Packed


def test_packed_nests():
    values = ({"x": tf.constant(1.0), "n": None, "k": 3}, [np.zeros((2,), "int32")])
    packed = Packed(values)
    assert [spec.shape.as_list() for spec in packed.specs] == [[], [2]]
    again = packed.unpack([tf.constant(5.0), tf.constant([1, 2])])
    assert float(again[0]["x"]) == 5.0
    assert again[0]["k"] == 3
    assert nests.signature(values) == nests.signature(packed.unpack(packed.tensors))
    assert nests.signature(values) != nests.signature(({**values[0], "k": 4}, values[1]))


def test_specs_of_data_are_taken_apart_as_batches_are():
    """Parts of composite tensors, and None, in the same order; the shape of a sparse one has two numbers."""
    x = tf.sparse.from_dense(np.eye(4, dtype="float32"))
    batch, data = (x, None), (tf.SparseTensorSpec([None, 4]), None)
    packed = Packed(batch)
    specs = [nests.open_rows(*one) for one in zip(packed.specs, packed.specs_in(data), strict=True)]
    assert [spec.shape.as_list() for spec in specs] == [[None, 2], [None], [2]]
    iterator = iter(tf.data.Dataset.from_tensors((x, np.ones((4, 3)))).repeat())
    batch = next(iterator)
    assert None not in Packed(batch).specs_in(iterator.element_spec)
    assert Packed(batch).specs_in(None) == [None] * 4


def test_open_rows():
    assert nests.open_rows(tf.TensorSpec([4, 3])).shape.as_list() == [None, 3]
    assert nests.open_rows(tf.TensorSpec([])).shape.as_list() == []
    assert nests.open_rows(tf.TensorSpec([4, 3]), tf.TensorSpec([None, 3])).shape.as_list() == [None, 3]
    assert nests.open_rows(tf.TensorSpec([4, 3]), tf.TensorSpec([4, None])).shape.as_list() == [4, 3]
    assert nests.open_rows(tf.TensorSpec([4, 3]), tf.TensorSpec(None)).shape.as_list() == [None, 3]


def test_shapes_of():
    floats, ints = tf.float32.as_datatype_enum, tf.int64.as_datatype_enum
    values = (
        np.ones((2, 3), "float32"),
        {"a": tf.ones((2, 3)), "b": tf.constant(1, tf.int64), "c": None},
    )
    assert nests.shapes_of(values) == ((floats, (2, 3)), (ints, ()))
    rows = tf.ragged.constant([[1.0], [2.0, 3.0]])
    assert (floats, (3,)) in nests.shapes_of(rows)


def test_dtype_name():
    assert nests.dtype_name(tf.ones(2, tf.bfloat16)) == "bfloat16"
    assert nests.dtype_name(keras.Input((3,), dtype="int32")) == "int32"


def test_synchronize():
    """Waits for each tensor, passes over what is none."""
    seen = []

    class Value:
        def numpy(self):
            seen.append(1)

    nests.synchronize({"loss": Value(), "more": [Value(), 3, None]})
    nests.synchronize(tf.constant(1.0))
    assert len(seen) == 2, "tf.nest.flatten no longer reaches into a dict of logs"


def test_same_spec():
    spec, other = tf.TensorSpec((None, 2)), tf.TensorSpec((3, 2))
    assert nests.same_spec((spec, {"a": spec}), (spec, {"a": spec}))
    assert not nests.same_spec((spec, {"a": spec}), (spec, {"a": other}))
    assert not nests.same_spec((spec, spec), (spec,))


def test_as_tensors():
    """A tf.function does so with its results."""
    made = nests.as_tensors({"loss": 1.5, "variable": tf.Variable(2), "nothing": None, "t": tf.constant(3)})
    assert made["nothing"] is None
    assert [tf.is_tensor(made[name]) for name in ("loss", "variable", "t")] == [True] * 3
    assert made["loss"].dtype == tf.float32


def test_each_once():
    first, second = [1], [1]
    once = nests.each_once([first, second, first])
    assert len(once) == 2
    assert nests.are_same(once, [first, second])
    assert not nests.are_same(once, [second, first])
    assert not nests.are_same(once, [first])


def test_variables_are_held_and_read_later():
    """Also of Keras; ``tf.is_tensor`` is true of them, and a ``tf.Variable`` is a nest of its handle."""
    own, other = tf.Variable(2.0), tf.Variable(5)
    held = nests.with_variables_held({"own": own, "list": [other], "number": 1.5, "t": tf.constant(3)})
    assert len(Packed(held).tensors) == 1
    assert isinstance(held["own"], nests._Later)
    own.assign(4.0)
    read = nests.with_variables_read(held)
    assert float(read["own"]) == 4.0
    assert int(read["list"][0]) == 5
    assert read["number"] == 1.5


def test_as_tensors_reads_variables_of_keras_and_keeps_ragged_rows():
    rows = tf.ragged.constant([[1], [2, 3]])
    tensors = nests.as_tensors({"rate": keras.optimizers.SGD(0.5).learning_rate, "rows": rows, "text": "a"})
    assert isinstance(tensors["rate"], tf.Tensor)
    assert tensors["rows"] is rows
    assert tensors["text"].dtype == tf.string


def test_specs_and_their_zeros():
    """Ragged tensors may have any number of values."""
    specs = nests.specs_of({"x": tf.ones((2, 3)), "n": None, "i": tf.constant([4])})
    assert specs["n"] is None
    assert nests.is_static([specs["x"], specs["i"]])
    assert not nests.is_static([tf.TensorSpec((None, 3))])
    zeros = nests.zeros_of([specs["x"], specs["i"]])
    assert [(zero.shape.as_list(), zero.dtype) for zero in zeros] == [([2, 3], tf.float32), ([1], tf.int32)]
    ragged = nests.specs_of(tf.ragged.constant([[1], [2, 3]]))
    assert not nests.is_static([ragged])
    with pytest.raises(ValueError, match="how many values"):
        nests.zeros_of(ragged)
