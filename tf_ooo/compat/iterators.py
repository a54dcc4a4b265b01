"""Iterators over data sets."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def is_iterator(value: object) -> bool:
    """Return whether ``value`` hands out the elements of a ``tf.data.Dataset`` on one device."""
    return isinstance(value, tf.data.Iterator)


def take(iterator: Any, count: int) -> list[Any]:
    """Up to ``count`` elements; fewer where the data end."""
    return [element for _, element in zip(range(count), iterator, strict=False)]


def iterator_over(elements: list[Any], like: Any) -> Any:
    """Return an iterator over ``elements`` that functions traced for the iterator ``like`` accept as it is.

    The public ``iter(dataset)`` would have the elements' own, more precise shapes: another trace.
    """
    from tensorflow.python.data.ops import iterator_ops

    dataset = tf.data.Dataset.from_tensors(elements[0])
    for element in elements[1:]:
        dataset = dataset.concatenate(tf.data.Dataset.from_tensors(element))
    inner = iter(dataset)
    out = iterator_ops.OwnedIterator(components=[inner._iterator_resource], element_spec=like.element_spec)
    out._ooo_inner = inner  # keeps the dataset alive
    return out
