"""Finds the ops of a graph under way that depend on the rows of a batch, or on random numbers."""

from __future__ import annotations

import re
from collections.abc import Collection

import tensorflow as tf

from tf_ooo.compat import nests

# Random numbers, of kernels, seeds and generators.
DRAWN = re.compile("Random|Multinomial|TruncatedNormal|StandardNormal|StatefulUniform")


def computed_from(tensor: tf.Tensor, sources: Collection[int]) -> bool:
    """Return whether a tensor is one of these, given by ``id``, or follows from one through its ops."""
    seen, waiting = set[int](), [tensor]
    while waiting:
        here = waiting.pop()
        if id(here) in sources:
            return True
        if id(here.op) not in seen:
            seen.add(id(here.op))
            waiting.extend(here.op.inputs)
    return False


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
        """Return whether the op depends on the rows."""
        self._look()
        return id(op) in self._data

    def is_drawn(self, op: tf.Operation) -> bool:
        """Return whether the op depends on random numbers."""
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
