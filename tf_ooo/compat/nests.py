"""Nests of tensors taken apart, and graphs imported where a function is being traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_ooo.errors import BackendError


def captures_of(concrete: Any) -> list[tuple[Any, Any]]:
    """(tensor outside, placeholder inside).  Raises BackendError for what only a call could tell."""
    graph = concrete.graph
    if getattr(graph, "deferred_external_captures", None):
        raise BackendError("the step reads values that are only known when it is called (deferred captures)")
    return list(graph.captures)


def import_here(graph_def: Any, replaced: dict[str, Any], wanted: Sequence[str], name: str = "") -> list[Any]:
    """Imports the graph into the function that is being traced, below ``name``.

    ``replaced`` maps tensor names to tensors.
    """
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    inside = {name: graph.capture(t) if hasattr(graph, "capture") else t for name, t in replaced.items()}
    return list(tf.graph_util.import_graph_def(graph_def, inside, list(wanted), name=name))


class Packed:
    """A nest of values taken apart into its tensors, the parts of composite ones too, and the rest.

    Numpy arrays count as tensors, as they do for a ``tf.function``.
    """

    def __init__(self, values: Any) -> None:
        import tensorflow as tf

        self._like = values
        self._flat = tf.nest.flatten(values, expand_composites=True)
        self._places = [place for place, value in enumerate(self._flat) if _is_tensor(value)]
        self.tensors = [self._flat[place] for place in self._places]

    @property
    def specs(self) -> list[Any]:
        """TensorSpecs of the tensors."""
        import tensorflow as tf

        return [tf.TensorSpec(tensor.shape, tf.as_dtype(tensor.dtype)) for tensor in self.tensors]

    def tensors_of(self, values: Any) -> list[Any]:
        """The tensors of a nest with the same signature."""
        import tensorflow as tf

        flat = tf.nest.flatten(values, expand_composites=True)
        return [flat[place] for place in self._places]

    def specs_in(self, specs: Any) -> list[Any]:
        """What a nest of specs says of each tensor; None where it is not one of such values."""
        import tensorflow as tf

        flat = tf.nest.flatten(specs, expand_composites=True)
        if len(flat) != len(self._flat):
            return [None] * len(self._places)
        return [flat[place] for place in self._places]

    def unpack(self, tensors: Sequence[Any]) -> Any:
        """The nest with other tensors in it."""
        import tensorflow as tf

        flat = list(self._flat)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        return tf.nest.pack_sequence_as(self._like, flat, expand_composites=True)


def as_tensors(values: Any) -> Any:
    """What a ``tf.function`` makes of its results: numbers and variables become tensors, None stays."""
    import tensorflow as tf

    def convert(value: Any) -> Any:
        return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)

    return tf.nest.map_structure(convert, values, expand_composites=True)


def _is_tensor(value: Any) -> bool:
    import tensorflow as tf

    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))


def signature(values: Any) -> Any:
    """Equal for nests of the same structure, shapes, dtypes and other values."""
    import tensorflow as tf

    flat = tf.nest.flatten(values, expand_composites=True)
    parts = [(tuple(v.shape), str(v.dtype)) if _is_tensor(v) else _hashable(v) for v in flat]
    return repr(tf.nest.map_structure(lambda _: None, values, expand_composites=False)), tuple(parts)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
