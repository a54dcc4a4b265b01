"""Losses that an optimizer scales for float16: their gradients overflow where those of the whole batch do.

The mean over a micro-batch's rows has larger gradients for each row than that over the batch's.  Here they
are multiplied by the micro-batch's share of the rows where the backward pass begins, not where it has ended,
so that all float16 numbers in between are stock's (Micikevicius et al. 2018, section 3.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_ooo.compat import keras_attributes, keras_optimizers
from tf_ooo.tracing.intercepting import values_of
from tf_ooo.tracing.micro_batches import StepRefused
from tf_ooo.tracing.of_data import computed_from

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
                method = keras_optimizers.loss_scaling(optimizer)
                if method:
                    instead = self._instead_of(getattr(optimizer, method))
                    keras_attributes.shadow(optimizer, method, instead)
                    shadows.callback(keras_attributes.unshadow, optimizer, method)
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
        given = [values_of(grad) for grad in grads if grad is not None]
        if not self._begins or not given:
            return False
        begins = {id(tensor) for tensor in self._begins}
        of_scaled = [computed_from(tensor, begins) for tensor in given]
        if any(of_scaled) and not all(of_scaled):
            raise StepRefused(
                "train_step gives an optimizer gradients of a loss that scale_loss has scaled, and of one "
                "that it has not; a pipeline weighs micro-batches before the one and behind the other: "
                "scale all losses, or use microbatches=1"
            )
        return any(of_scaled)


def by_hand(optimizer: Any) -> list[str]:
    """Says of an optimizer that scales losses, and was given gradients of others, what that changes."""
    method = keras_optimizers.loss_scaling(optimizer)
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


def through_half(total: Any) -> Any:
    """Return the sum as one float16 number has it: infinite where that overflows."""
    return tf.cast(tf.cast(total, tf.float16), total.dtype)
