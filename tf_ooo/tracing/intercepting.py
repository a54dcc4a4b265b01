"""Stands between a step's gradients and its optimizers, and scales losses for float16 there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_ooo.compat import keras_compiled, keras_layers, tf_functions
from tf_ooo.errors import BackendError
from tf_ooo.tracing.micro_batches import StepRefused, computed_from

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
    proceeding = False

    def instead_of(optimizer: keras.optimizers.Optimizer, apply: Callable[..., Any]) -> Callable[..., Any]:
        @tf_functions.left_as_written
        def intercepted_apply(grads: Any, trainable_variables: Any = None) -> Any:
            as_called = tf_functions.as_in_the_caller(apply)
            if proceeding:
                return as_called(grads, trainable_variables)
            explicit = trainable_variables is not None
            variables = keras_compiled.variables_to_apply(optimizer, trainable_variables)

            def proceed(changed: Sequence[Any]) -> Any:
                nonlocal proceeding
                proceeding = True
                try:
                    return as_called(changed, variables if explicit else None)
                finally:
                    proceeding = False

            return on_update(Update(optimizer, list(grads), variables, explicit, proceed))

        return intercepted_apply

    for optimizer in optimizers:
        keras_compiled.shadow_update(optimizer, functools.partial(instead_of, optimizer))
    try:
        yield
    finally:
        for optimizer in optimizers:
            keras_compiled.unshadow_update(optimizer)


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


# Losses that an optimizer scales for float16: their gradients overflow where those of the whole batch do. The
# mean over a micro-batch's rows has larger gradients for each row than that over the batch's. Here they are
# multiplied by the micro-batch's share of the rows where the backward pass begins, not where it has ended, so
# that all float16 numbers in between are stock's (Micikevicius et al. 2018, section 3.2).

_SUMS = ("AddN", "AddV2")


class Scaled:
    """The scaled losses of one micro-batch, whose gradients count ``share`` of the batch's rows already.

    ``share`` 1: nothing is changed.
    """

    def __init__(self, share: object = 1.0) -> None:
        self._share = share
        self._begins: list[Any] = []  # the first gradient of each scaled loss

    @contextlib.contextmanager
    def noted(self, optimizers: Sequence[Any]) -> Iterator[None]:
        """Inside the block the gradients of what these optimizers scale count their share."""
        with contextlib.ExitStack() as shadows:
            for optimizer in () if isinstance(self._share, float) and self._share == 1.0 else optimizers:
                method = keras_compiled.loss_scaling(optimizer)
                if method:
                    instead = self._instead_of(getattr(optimizer, method))
                    shadows.enter_context(keras_layers.shadowed(optimizer, method, instead))
            yield

    def _instead_of(self, scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(loss: object) -> Any:
            return tf.identity(loss), self._begin

        def scale_and_count(loss: object) -> Any:
            if callable(loss):  # Keras 2 returns another function then
                return lambda: scale_and_count(loss())
            return scale(tf.custom_gradient(counted)(tf.convert_to_tensor(loss)))

        return scale_and_count

    def _begin(self, upstream: Any) -> Any:
        """The gradient of a scaled loss counts its share; the loss, which may be logged, stays what it is."""
        self._begins.append(upstream * tf.cast(self._share, upstream.dtype))
        return self._begins[-1]

    def counts(self, grads: Sequence[Any]) -> bool:
        """Return whether these gradients are of scaled losses. StepRefused: some of them are."""
        begins = {id(tensor) for tensor in self._begins}
        of_scaled = [begins and computed_from(values_of(grad), begins) for grad in grads if grad is not None]
        if any(of_scaled) and not all(of_scaled):
            raise StepRefused(
                "train_step gives an optimizer gradients of a loss that scale_loss has scaled, and of one "
                "that it has not; a pipeline weighs micro-batches before the one and behind the other: "
                "scale all losses, or use microbatches=1"
            )
        return any(of_scaled)


def by_hand(optimizer: Any) -> list[str]:
    """Says of an optimizer that scales losses, and was given gradients of others, what that changes."""
    method = keras_compiled.loss_scaling(optimizer)
    if not method:
        return []
    return [
        f"train_step does not scale its loss by {method} of optimizer {optimizer.name!r}: float16 gradients "
        "of a micro-batch are as many times larger than the batch's as there are micro-batches, so that "
        f"updates may be skipped where stock applies them; scale by {method}, or use microbatches=1"
    ]


def terms_of(grad: tf.Tensor | tf.IndexedSlices) -> list[Any]:
    """Return the terms of a float32 gradient if one is a float16 number; else the gradient itself."""
    terms, waiting = [], [grad]
    while waiting:
        tensor = waiting.pop()
        if isinstance(tensor, tf.Tensor) and tensor.op.type in _SUMS:
            waiting.extend(reversed(tensor.op.inputs))
        else:
            terms.append(tensor)
    return terms if any(map(is_of_half, terms)) else [grad]


def is_of_half(tensor: tf.Tensor) -> bool:
    """Return whether it is a float16 number in a wider type."""
    return (
        isinstance(tensor, tf.Tensor) and tensor.op.type == "Cast" and tensor.op.inputs[0].dtype == tf.float16
    )
