"""Stands between a step's gradients and its optimizers: the one place where ``apply`` is intercepted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_optimizers, tf_functions
from tf_ooo.errors import BackendError

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Update:
    """One call of an optimizer's ``apply``; ``explicit``: the caller named the variables.

    ``grads``: one for each variable, or None.  ``proceed`` applies others as the caller wanted.
    """

    optimizer: keras.optimizers.Optimizer
    grads: list[Any]
    variables: list[Any]
    explicit: bool
    proceed: Callable[[Sequence[Any]], Any]


class TurnsNeeded(Exception):
    """The updates of a step come in turns: each needs what the one before has left."""


class CopiesNeeded(Exception):
    """States change once a step, for which all micro-batches have to be copies of one."""


@contextlib.contextmanager
def intercepted(optimizers: Sequence[Any], on_update: Callable[[Update], Any]) -> Iterator[None]:
    """Inside the block ``on_update`` takes the place of each optimizer's ``apply``.

    Not of what an update calls while it proceeds: a loss-scaling optimizer calls the one inside it.
    """
    intercepting = _Intercepting(on_update)
    for optimizer in optimizers:
        keras_optimizers.shadow_update(optimizer, functools.partial(intercepting.instead_of, optimizer))
    try:
        yield
    finally:
        for optimizer in optimizers:
            keras_optimizers.unshadow_update(optimizer)


class _Intercepting:
    def __init__(self, on_update: Callable[[Update], Any]) -> None:
        self._on_update, self._proceeding = on_update, False

    def instead_of(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., Any]
    ) -> Callable[..., Any]:
        @tf_functions.left_as_written
        def intercepted_apply(grads: Any, trainable_variables: Any = None) -> Any:
            as_called = tf_functions.as_in_the_caller(apply)
            if self._proceeding:
                return as_called(grads, trainable_variables)
            explicit = trainable_variables is not None
            variables = keras_optimizers.variables_to_apply(optimizer, trainable_variables)

            def proceed(changed: Sequence[Any]) -> Any:
                self._proceeding = True
                try:
                    return as_called(changed, variables if explicit else None)
                finally:
                    self._proceeding = False

            return self._on_update(Update(optimizer, list(grads), variables, explicit, proceed))

        return intercepted_apply


def refuse_twice(optimizer: keras.optimizers.Optimizer, applied: Iterable[Any], instead: str) -> None:
    """Raises BackendError where the optimizer is one of those that have applied gradients in this step."""
    if any(before is optimizer for before in applied):
        raise BackendError(f"train_step applies gradients twice with one optimizer; {instead}")


def ops_so_far() -> int:
    """Count the ops of the graph that is being traced."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> Any:
    """Return the numbers of a gradient: of an embedding's those of its rows; None stays None."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def tensors_of(grad: tf.Tensor | tf.IndexedSlices) -> list[Any]:
    """Return the tensors of a gradient: of IndexedSlices values and rows, of None none."""
    if grad is None:
        return []
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def times(grad: tf.Tensor | tf.IndexedSlices, factor: object) -> Any:
    """``grad * factor``, of slices their values; the gradient itself where the factor is the number 1."""
    if isinstance(factor, float) and factor == 1.0:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(times(grad.values, factor), grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)
