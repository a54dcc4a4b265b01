"""Combines gradients of several ranks, and compresses them on their way. No TensorFlow until it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tf_ooo.errors import BackendError

if TYPE_CHECKING:
    import tensorflow as tf

OPS = ("Average", "Sum", "Adasum")
COMPRESSIONS = ("none", "fp16", "bf16")


def compressed(tensor: tf.Tensor, compression: str) -> tf.Tensor:
    """The tensor cast to the 16-bit type of ``compression``; integers and 16-bit floats stay as they are."""
    import tensorflow as tf

    if compression == "none" or not tensor.dtype.is_floating or tensor.dtype.size <= 2:
        return tensor
    return tf.cast(tensor, tf.float16 if compression == "fp16" else tf.bfloat16)


def restored(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return the tensor cast back to the type of ``like``."""
    import tensorflow as tf

    return tensor if tensor.dtype == like.dtype else tf.cast(tensor, like.dtype)


def check_ranks(size: int) -> None:
    """Raises BackendError unless ``size`` is a power of two: Adasum combines gradients in pairs."""
    if size & (size - 1):
        raise BackendError(f"op='Adasum' needs 2, 4, 8, ... ranks, not {size}; use 'Average'")


def adasum(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds what two gradients agree on once, and the rest of both (Maleki et al., 2021).

    As in Horovod: rank 0 with 1, 2 with 3, then the pairs.
    """
    level = list(gradients)
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """``(1 - ab / 2aa) a + (1 - ab / 2bb) b``; sums in float64."""
    import tensorflow as tf

    x, y = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    both = tf.reduce_sum(x * y)
    of_x = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(x * x))
    of_y = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(y * y))
    return tf.cast(of_x * x + of_y * y, a.dtype)
