"""Finds the ops of a graph under way that depend on the rows of a batch, or on random numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_ooo.compat import nests

# Random numbers, of kernels, seeds and generators.
DRAWN = re.compile("Random|Multinomial|TruncatedNormal|StandardNormal|StatefulUniform")


def upstream(
    tensors: Iterable[Any], ends: Callable[[Any], bool] = lambda tensor: False
) -> Iterator[tf.Tensor]:
    """Yield tensors and all that they are computed from, each once; no inputs of one that ``ends``."""
    seen, waiting = set[int](), list(tensors)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield tensor
        if not ends(tensor):
            waiting.extend(tensor.op.inputs)


def behind(tensor: tf.Tensor, types: Collection[str]) -> Any:
    """Return what ops of these types hand on as this tensor."""
    while tensor.op.type in types:
        tensor = tensor.op.inputs[0]
    return tensor


def computed_from(tensor: tf.Tensor, sources: Collection[int]) -> bool:
    """Return whether a tensor is one of these, given by ``id``, or follows from one through its ops."""
    return any(id(each) in sources for each in upstream([tensor]))


def rows_of_part(part: object) -> int | None:
    """Return how many rows a nest of tensors has, as far as the trace knows."""
    return next((t.shape[0] for t in nests.Packed(part).tensors if t.shape.rank), None)


class OfData:
    """Asked about an op, it looks at those that were made since; ``part`` is a nest of the rows."""

    def __init__(self, part: object) -> None:
        self._given = {id(tensor) for tensor in nests.Packed(part).tensors}
        self._data, self._drawn = set[int](), set[int]()
        self._known = 0

    def reads_data(self, op: tf.Operation) -> bool:
        self._look()
        return id(op) in self._data

    def is_drawn(self, op: tf.Operation) -> bool:
        self._look()
        return id(op) in self._drawn

    def __contains__(self, op: tf.Operation) -> bool:
        return self.reads_data(op) or id(op) in self._drawn

    def _look(self) -> None:
        operations = tf.compat.v1.get_default_graph().get_operations()
        for op in operations[self._known :]:
            if any(id(tensor) in self._given or id(tensor.op) in self._data for tensor in op.inputs):
                self._data.add(id(op))
            if DRAWN.search(op.type) or any(id(tensor.op) in self._drawn for tensor in op.inputs):
                self._drawn.add(id(op))
        self._known = len(operations)
