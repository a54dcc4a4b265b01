"""Divides a batch into micro-batches in the function that is traced for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from tf_ooo.compat import nests
from tf_ooo.tracing.micro_batches import Division, part_of, relative_weights, rows_of

# Traced with their own rows are so many kinds of batches of a fit: most fits have two, the last of an epoch.
OWN_TRACES = 3


class Split(Protocol):
    """Says what each micro-batch is and counts: ``share`` of the batch's rows, ``weights`` beside the
    first's.

    ``scale``: of the first, of the batch.
    """

    @property
    def count(self) -> int: ...
    @property
    def weights(self) -> Sequence[Any]: ...
    @property
    def scale(self) -> Any: ...
    def share(self, number: int) -> Any: ...
    def kind(self, number: int) -> Hashable: ...
    def part(self, batch: object, number: int) -> Any: ...


class FixedRows:
    """A batch whose number of rows is known."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows, self.count = tuple(rows), len(rows)
        self.weights, self.scale = relative_weights(rows)

    def share(self, number: int) -> float:
        return self._rows[number] / sum(self._rows)

    def kind(self, number: int) -> Hashable:
        return self._rows[number]

    def part(self, batch: object, number: int) -> Any:
        return part_of(batch, self._rows, number)


class OpenRows:
    """A batch of any number of rows, at least ``count``; made in the function that is being traced.

    Numbers are as those of :class:`FixedRows`, calculated in float64 too, when the function runs.
    """

    def __init__(self, batch: object, count: int) -> None:
        self.count = count
        first = next(tensor for tensor in tf.nest.flatten(batch) if tensor.shape.rank)
        total = tf.shape(first)[0]
        each, more = total // count, total % count
        rows = [each + tf.cast(number < more, tf.int32) for number in range(count)]
        self._ends = [0, *(each * (number + 1) + tf.minimum(more, number + 1) for number in range(count))]
        self._rows, self._total = [tf.cast(part, tf.float64) for part in rows], tf.cast(total, tf.float64)
        self.weights = [1.0, *(part / self._rows[0] for part in self._rows[1:])]
        self.scale = self._rows[0] / self._total

    def share(self, number: int) -> Any:
        return tf.cast(self._rows[number] / self._total, tf.float32)

    def kind(self, number: int) -> Hashable:
        return None

    def part(self, batch: object, number: int) -> Any:
        begin, end = self._ends[number], self._ends[number + 1]
        return tf.nest.map_structure(lambda tensor: tensor[begin:end] if tensor.shape.rank else tensor, batch)


@dataclass(frozen=True)
class OpenBatch:
    """The spec of batches with any number of rows, in so many parts; a nest of dense tensors."""

    spec: Any
    parts: int

    @property
    def key(self) -> Hashable:
        return "any rows", self.parts, repr(self.spec)


def open_batch(batch: object, division: Division) -> OpenBatch | None:
    """None: its number of rows has to be known: something is not dense, or there are fewer than parts."""
    dense = all(isinstance(value, tf.Tensor) for value in tf.nest.flatten(batch))
    parts = len(division.split(rows_of(batch))) if dense else 1
    if parts == 1 or parts == rows_of(batch) < division.most:
        return None
    return OpenBatch(tf.nest.map_structure(nests.open_rows, batch), parts)


class BatchesSeen:
    """The kinds of batches that a fit has had, whichever function trained on them."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def has_own_trace(self, signature: object) -> bool:
        """Return whether a batch is of one of the first :data:`OWN_TRACES` kinds."""
        return self._seen.setdefault(signature, len(self._seen)) < OWN_TRACES
