"""A batch in parts: how many rows each micro-batch has, and what its gradients count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_ooo.errors import BackendError


class StepRefused(BackendError):
    """The step on a batch is not the mean of the steps on its micro-batches; nothing has changed."""


def split_rows(rows: int, microbatches: int) -> tuple[int, ...]:
    """Return rows of each micro-batch: as equal as can be, larger ones first, none empty.

    A batch of fewer rows than micro-batches has one row in each.
    """
    count = max(1, min(rows, microbatches))
    return tuple(rows // count + (number < rows % count) for number in range(count))


@dataclass(frozen=True)
class Division:
    """Says how batches are divided into micro-batches.

    Attributes:
        most: micro-batches of a batch, unless it has fewer rows.
        least_rows: a micro-batch has at least so many, unless the batch has fewer.
        least: micro-batches that there are even where they have fewer rows than ``least_rows``.
    """

    most: int
    least_rows: int = 1
    least: int = 1

    def split(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each micro-batch of a batch of so many ``rows``."""
        return split_rows(rows, min(self.most, max(self.least, rows // self.least_rows)))


def rows_of(batch: object) -> int:
    """Return the rows of a batch.  StepRefused where its tensors do not have the same number."""
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
    """Return the batch's micro-batches; the batch itself where there is one."""
    return [part_of(batch, rows, number) for number in range(len(rows))]


def part_of(batch: object, rows: Sequence[int], number: int) -> Any:
    """Return one micro-batch of the batch; the batch itself where there is one."""
    if len(rows) == 1:
        return batch
    begin = sum(rows[:number])
    return tf.nest.map_structure(lambda tensor: _slice(tensor, begin, begin + rows[number]), batch)


def _slice(tensor: tf.Tensor, begin: int, end: int) -> Any:
    if isinstance(tensor, tf.SparseTensor):
        shape = [end - begin, *tensor.shape[1:]]
        return tf.sparse.slice(tensor, [begin] + [0] * (len(shape) - 1), shape)
    if (
        getattr(tensor, "shape", None) is None or tensor.shape.rank == 0
    ):  # an optional input that is not given
        return tensor
    return tensor[begin:end]


def relative_weights(rows: Sequence[int]) -> tuple[tuple[float, ...], float]:
    """Return the factors of the micro-batches' mean gradients, and then of their sum, for the batch's mean.

    The first is 1, so that gradients of equal micro-batches are multiplied once, after they are added.
    """
    return tuple(count / rows[0] for count in rows), rows[0] / sum(rows)
