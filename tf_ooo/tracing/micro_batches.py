"""Divides a batch into micro-batches: their rows and counts, and the ops that depend on a batch's rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_ooo.compat import nests
from tf_ooo.errors import BackendError

# This many kinds of batches are traced with their own rows: most fits have two, the last of an epoch.
OWN_TRACES = 3


class StepRefused(BackendError):
    """The step on a batch is not the mean of the steps on its micro-batches; nothing has changed."""


def split_rows(rows: int, microbatches: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch: as equal as can be, larger ones first, none empty.

    If a batch has fewer rows than micro-batches, each row becomes one.
    """
    count = max(1, min(rows, microbatches))
    return tuple(rows // count + (number < rows % count) for number in range(count))


@dataclass(frozen=True)
class Division:
    """Says how batches are divided into micro-batches.

    Attributes:
        most: the number of micro-batches, unless the batch has fewer rows.
        least_rows: a micro-batch has at least this many rows, unless the batch has fewer.
        least: the number of micro-batches made even if they have fewer rows than ``least_rows``.
    """

    most: int
    least_rows: int = 1
    least: int = 1

    def split(self, rows: int) -> tuple[int, ...]:
        return split_rows(rows, min(self.most, max(self.least, rows // self.least_rows)))


def rows_of(batch: object) -> int:
    """Return the rows of a batch; StepRefused if its tensors differ in their number of rows."""
    rows = {
        int(tensor.shape[0])
        for tensor in tf.nest.flatten(batch, expand_composites=False)
        if getattr(tensor, "shape", None) is not None and tensor.shape.rank
    }
    if len(rows) != 1:
        said = f"has {sorted(rows)}" if rows else "none has rows"
        raise StepRefused(
            f"the tensors of a batch must all have as many rows, to be cut into micro-batches: {said}"
        )
    return rows.pop()


def parts_of(batch: object, rows: Sequence[int]) -> list[Any]:
    """Return the batch's micro-batches; the batch itself if there is one."""
    if len(rows) == 1:
        return [batch]
    begins = itertools.accumulate(rows, initial=0)
    return [_slices(batch, begin, begin + count) for begin, count in zip(begins, rows, strict=False)]


def _slices(batch: object, begin: Any, end: Any) -> Any:
    def of(tensor: tf.Tensor) -> Any:
        if isinstance(tensor, tf.SparseTensor):
            shape = [end - begin, *tensor.shape[1:]]
            return tf.sparse.slice(tensor, [begin] + [0] * (len(shape) - 1), shape)
        if getattr(tensor, "shape", None) is None or tensor.shape.rank == 0:  # None: the input is not given
            return tensor
        return tensor[begin:end]

    return tf.nest.map_structure(of, batch)


class FixedRows:
    """Describes a batch whose number of rows is known: the rows of each micro-batch, and what it counts.

    ``share`` is the part of the batch's rows.  ``weights`` multiply the micro-batches' mean gradients and
    ``scale`` their sum, to give the batch's mean.  The first weight is 1, so that gradients of equal
    micro-batches are multiplied only once, after they are added.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows, self.count = tuple(rows), len(rows)
        self.weights, self.scale = tuple(part / rows[0] for part in rows), rows[0] / sum(rows)

    def share(self, number: int) -> float:
        return self._rows[number] / sum(self._rows)

    def kind(self, number: int) -> Hashable:
        return self._rows[number]

    def part(self, batch: object, number: int) -> Any:
        begin = sum(self._rows[:number])
        return batch if self.count == 1 else _slices(batch, begin, begin + self._rows[number])


class OpenRows:
    """Describes a batch of any number of rows, at least ``count``, in the function being traced.

    The numbers are those of :class:`FixedRows`, also calculated in float64, when the function runs.
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
        return _slices(batch, self._ends[number], self._ends[number + 1])


Split = FixedRows | OpenRows


@dataclass(frozen=True)
class OpenBatch:
    """Holds the spec of batches with any number of rows, in ``count`` parts; a nest of dense tensors."""

    spec: Any
    parts: int

    @property
    def key(self) -> Hashable:
        return "any rows", self.parts, repr(self.spec)


def open_batch(batch: object, division: Division) -> OpenBatch | None:
    """Return the batch with open rows; None if they must be known: not all dense, or too few rows."""
    dense = all(isinstance(value, tf.Tensor) for value in tf.nest.flatten(batch))
    parts = len(division.split(rows_of(batch))) if dense else 1
    if parts == 1 or parts == rows_of(batch) < division.most:
        return None
    return OpenBatch(tf.nest.map_structure(nests.open_rows, batch), parts)


class BatchesSeen:
    """Holds the kinds of batches that a fit has seen, whichever function trained on them."""

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def has_own_trace(self, signature: object) -> bool:
        """Return whether a batch is of one of the first :data:`OWN_TRACES` kinds."""
        return self._seen.setdefault(signature, len(self._seen)) < OWN_TRACES


# These ops draw random numbers, for kernels, from seeds and by generators.
DRAWN = re.compile("Random|Multinomial|TruncatedNormal|StandardNormal|StatefulUniform")


def upstream(
    tensors: Iterable[Any], ends: Callable[[Any], bool] = lambda tensor: False
) -> Iterator[tf.Tensor]:
    """Yield tensors and all that they are computed from, each once; stops at tensors that ``ends`` names."""
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
    """Return the tensor that ops of these types hand on as this one."""
    while tensor.op.type in types:
        tensor = tensor.op.inputs[0]
    return tensor


def computed_from(tensor: tf.Tensor, sources: Collection[int]) -> bool:
    """Return whether a tensor is one of ``sources`` (ids), or is computed from one."""
    return any(id(each) in sources for each in upstream([tensor]))


def rows_of_part(part: object) -> int | None:
    """Return how many rows a nest of tensors has, if the trace knows it."""
    return next((t.shape[0] for t in nests.Packed(part).tensors if t.shape.rank), None)


class OfData:
    """Tells whether an op depends on data, from the ops made since the last time and ``part``, the rows."""

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
        return self.reads_data(op) or self.is_drawn(op)

    def _look(self) -> None:
        operations = tf.compat.v1.get_default_graph().get_operations()
        for op in operations[self._known :]:
            if any(id(tensor) in self._given or id(tensor.op) in self._data for tensor in op.inputs):
                self._data.add(id(op))
            if DRAWN.search(op.type) or any(id(tensor.op) in self._drawn for tensor in op.inputs):
                self._drawn.add(id(op))
        self._known = len(operations)
