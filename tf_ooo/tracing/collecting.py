"""Gradients of micro-batches, added up in a fixed order, then applied once.

While the train step of a micro-batch is traced, the ``apply`` of every optimizer found on the model only
collects.  Loss scaling, clipping, weight decay and accumulation are inside the optimizers, so that
they act once, on the whole batch's gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tf_ooo import compat
from tf_ooo.compat.pipeline import marked_sums
from tf_ooo.errors import BackendError
from tf_ooo.tracing.fixed_rows import fixed_rows


@dataclass
class _Applied:
    """What one call of an optimizer's ``apply`` was given, micro-batch by micro-batch."""

    optimizer: Any
    variables: list[Any]
    explicit: bool
    sums: list[Any]
    slices: dict[int, list[Any]] = field(default_factory=dict)
    fixed_rows: dict[int, np.ndarray] = field(default_factory=dict)


class Collecting:
    """Gradients of one step.

    Args:
        optimizers: those whose ``apply`` collects.
        weights: what each micro-batch's gradients are multiplied by.
        scale: what their sum is multiplied by; 1.0: it is not.
    """

    def __init__(self, optimizers: Sequence[Any], weights: Sequence[float], scale: float) -> None:
        self.optimizers, self.weights, self.scale = list(optimizers), weights, scale
        self.applied: list[_Applied] = []
        self.collected_after: list[int] = []
        self._number = 0
        self._calls = 0

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """Inside the block, gradients are those of a micro-batch."""
        self._number, self._calls = number, 0
        for optimizer in self.optimizers:
            compat.shadow_update(optimizer, functools.partial(self._collect_for, optimizer))
        try:
            yield
        finally:
            for optimizer in self.optimizers:
                compat.unshadow_update(optimizer)
        if self._calls != len(self.applied):
            raise BackendError(
                f"train_step applies gradients {len(self.applied)} times for the first micro-batch and "
                f"{self._calls} times for another"
            )

    def _collect_for(self, optimizer: Any, _: Callable[..., Any]) -> Callable[..., None]:
        def collect(grads: Any, trainable_variables: Any = None) -> None:
            explicit = trainable_variables is not None
            variables = compat.variables_to_apply(optimizer, trainable_variables)
            self._collect(optimizer, list(grads), variables, explicit)

        return collect

    def _collect(self, optimizer: Any, grads: list[Any], variables: list[Any], explicit: bool) -> None:
        call, self._calls = self._calls, self._calls + 1
        if self._number == 0:
            if any(before.optimizer is optimizer for before in self.applied):
                raise BackendError(
                    "train_step applies gradients twice with one optimizer; a pipeline applies them once, "
                    "after all micro-batches"
                )
            self.applied.append(_Applied(optimizer, variables, explicit, [None] * len(grads)))
            self.collected_after.append(ops_so_far())
        if call >= len(self.applied) or len(self.applied[call].sums) != len(grads):
            raise BackendError(
                "train_step applies other gradients for a later micro-batch than for the first"
            )
        into = self.applied[call]
        for place, grad in enumerate(grads):
            self._add(into, place, grad)

    def _add(self, into: _Applied, place: int, grad: Any) -> None:
        import tensorflow as tf

        if grad is None:
            return
        weighted = _times(grad, self.weights[self._number])
        if isinstance(grad, tf.IndexedSlices):
            self._add_slices(into, place, weighted)
            return
        if into.sums[place] is None:
            into.sums[place] = weighted
            return
        with tf.name_scope("sum"), marked_sums():
            into.sums[place] = into.sums[place] + weighted

    def _add_slices(self, into: _Applied, place: int, slices: Any) -> None:
        """Adds up those of rows that are the same as before; others come one after the other."""
        import tensorflow as tf

        rows = fixed_rows(slices.indices)
        others = into.slices.setdefault(place, [])
        before = into.fixed_rows.get(place)
        if rows is not None and before is not None and np.array_equal(rows, before):
            with tf.name_scope("sum"), marked_sums():
                total = others[0].values + slices.values
            others[0] = tf.IndexedSlices(total, others[0].indices, slices.dense_shape)
            return
        if rows is not None and not others:
            into.fixed_rows[place] = rows
        others.append(_with_own_rows(slices))

    def apply(self) -> None:
        """Hands the sums to the optimizers, in the order in which the first micro-batch did."""
        for one in self.applied:
            grads = [self._total(one, place) for place in range(len(one.sums))]
            compat.update(one.optimizer, grads, one.variables if one.explicit else None)

    def _total(self, one: _Applied, place: int) -> Any:
        import tensorflow as tf

        total = one.sums[place]
        if place in one.slices:
            total = _joined(one.slices[place])
            if one.sums[place] is not None:  # dense for some micro-batches, slices for others
                total = tf.convert_to_tensor(total) + one.sums[place]
        return None if total is None else _times(total, self.scale)


def _joined(slices: Sequence[Any]) -> Any:
    """Slices of all micro-batches, one after the other."""
    import tensorflow as tf

    if len(slices) == 1:
        return slices[0]
    with tf.name_scope("sum"), marked_sums():
        values = tf.concat([one.values for one in slices], 0)
        indices = tf.concat([one.indices for one in slices], 0)
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)


def _with_own_rows(slices: Any) -> Any:
    """Slices whose rows stay this micro-batch's.

    Constant rows graph optimizers would join with the others' beforehand; what might be given otherwise they
    leave alone.
    """
    import tensorflow as tf

    rows = tf.raw_ops.PlaceholderWithDefault(input=slices.indices, shape=slices.indices.shape)
    return tf.IndexedSlices(slices.values, rows, slices.dense_shape)


def _times(grad: Any, factor: float) -> Any:
    """``grad * factor``; the gradient itself where the factor is 1."""
    import tensorflow as tf

    if factor == 1.0:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(_times(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def ops_so_far() -> int:
    """How many ops the graph has that is being traced."""
    import tensorflow as tf

    return len(tf.compat.v1.get_default_graph().get_operations())
