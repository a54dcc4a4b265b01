"""Takes nests of tensors apart, compares them, and waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


class Packed:
    """Holds the tensors of a nest of values, parts of composite ones included, and the rest.

    Numpy arrays count as tensors, as for a ``tf.function``.
    """

    def __init__(self, values: object) -> None:
        self._like = values
        self._flat = tf.nest.flatten(values, expand_composites=True)
        self._places = [place for place, value in enumerate(self._flat) if _is_tensor(value)]
        self.tensors = [self._flat[place] for place in self._places]

    @property
    def specs(self) -> list[Any]:
        return [tf.TensorSpec(tensor.shape, tf.as_dtype(tensor.dtype)) for tensor in self.tensors]

    def tensors_of(self, values: object) -> list[Any]:
        """Return the tensors of a nest with the same signature."""
        flat = tf.nest.flatten(values, expand_composites=True)
        return [flat[place] for place in self._places]

    def specs_in(self, specs: object) -> list[Any]:
        """Return the part of a nest of specs for each tensor; None if it is for no such value."""
        flat = tf.nest.flatten(specs, expand_composites=True)
        known = len(flat) == len(self._flat)
        return [flat[place] if known else None for place in self._places]

    def unpack(self, tensors: Sequence[Any]) -> Any:
        flat = list(self._flat)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        return tf.nest.pack_sequence_as(self._like, flat, expand_composites=True)


def as_tensors(values: object) -> Any:
    """Convert values as a ``tf.function`` converts results: numbers, variables to tensors; None stays."""

    def convert(value: object) -> Any:
        # ``tf.is_tensor`` is also true for variables.
        stays = value is None or isinstance(value, (tf.Tensor, *_COMPOSITE))
        return value if stays else tf.convert_to_tensor(value)

    return tf.nest.map_structure(convert, values)


class _Later:
    """Holds a variable in a nest as one value: a ``tf.Variable`` itself is a nest of its handle."""

    def __init__(self, variable: object) -> None:
        self.variable = variable


def with_variables_held(values: object) -> Any:
    """Return a nest that hides its variables, Keras' too; :func:`with_variables_read` reads them."""

    def hold(value: object) -> Any:
        return _Later(value) if tf.is_tensor(value) and hasattr(value, "assign") else value

    return tf.nest.map_structure(hold, values)


def with_variables_read(values: object) -> Any:
    """Read, here and now, the variables that :func:`with_variables_held` has held."""

    def read(value: object) -> Any:
        return tf.convert_to_tensor(value.variable) if isinstance(value, _Later) else value

    return tf.nest.map_structure(read, values)


def specs_of(values: object) -> Any:
    """Return the nest of the tensors' specs, with all sizes known; None stays."""
    return tf.nest.map_structure(
        lambda value: None if value is None else tf.type_spec_from_value(value), values
    )


def zeros_of(specs: object) -> Any:
    """Return tensors of zeros; ValueError for ragged or sparse ones, which have no fixed number of values."""

    def zeros(spec: object) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            raise ValueError(f"{type(spec).__name__} does not say how many values there are")
        return tf.zeros(spec.shape, spec.dtype)

    return tf.nest.map_structure(zeros, specs)


def signature(values: object) -> Any:
    """Return a key that is equal for nests of the same structure, shapes, dtypes and other values."""
    flat = tf.nest.flatten(values, expand_composites=True)
    parts = [(tuple(v.shape), str(v.dtype)) if _is_tensor(v) else _hashable(v) for v in flat]
    return repr(tf.nest.map_structure(lambda _: None, values, expand_composites=False)), tuple(parts)


def each_once(values: Iterable[Any]) -> list[Any]:
    """Return the objects in order, without repeats."""
    return list({id(value): value for value in values}.values())


def are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both hold the very same objects, in the same order."""
    return len(values) == len(others) and all(a is b for a, b in zip(values, others, strict=True))


def same_spec(a: object, b: object) -> bool:
    """Return whether two nests of type specs are equal."""
    try:
        tf.nest.assert_same_structure(a, b)
    except (TypeError, ValueError):
        return False
    return bool(tf.nest.flatten(a) == tf.nest.flatten(b))


def is_static(specs: object) -> bool:
    """Return whether the specs leave no size open."""
    flat = tf.nest.flatten(specs)
    return all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in flat)


def open_rows(spec: Any, known: Any = None) -> Any:
    """Return the TensorSpec of any number of rows, or of ``known``'s rows if all batches have these."""
    if not spec.shape.rank:
        return tf.TensorSpec(spec.shape, spec.dtype)
    rows = known.shape[0] if isinstance(known, tf.TensorSpec) and known.shape.rank else None
    return tf.TensorSpec([rows, *spec.shape[1:]], spec.dtype)


def shapes_of(values: object) -> tuple[tuple[int, tuple[int | None, ...]], ...]:
    """Return (dtype number, shape) of every tensor and array in a nest, each once."""
    flat = tf.nest.flatten(values, expand_composites=True)
    tensors = [value for value in flat if hasattr(value, "shape") and hasattr(value, "dtype")]
    kinds = [(tf.as_dtype(t.dtype), tf.TensorShape(t.shape)) for t in tensors]
    return tuple({(d.as_datatype_enum, tuple(s.as_list())): None for d, s in kinds if s.rank is not None})


def dtype_name(tensor: Any) -> str:
    """Return a tensor's dtype as text like ``"float32"``: Keras 3 has names, Keras 2 TensorFlow's types."""
    name: str = tf.as_dtype(tensor.dtype).name
    return name


def synchronize(outputs: object) -> None:
    """Wait until all tensors of a nest are computed; if it has none, until all devices are idle."""
    tensors = [value for value in tf.nest.flatten(outputs) if hasattr(value, "numpy")]
    for tensor in tensors:
        tensor.numpy()
    if not tensors and tf.executing_eagerly():
        tf.test.experimental.sync_devices()


def _is_tensor(value: object) -> bool:
    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))


def _hashable(value: object) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
