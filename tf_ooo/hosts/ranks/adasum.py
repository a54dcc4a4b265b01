"""Adasum (Maleki et al., 2021): adds what two gradients agree on once, and the rest of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_ooo.errors import BackendError


def check_ranks(size: int) -> None:
    """Raises BackendError unless ``size`` is a power of two: gradients are combined in pairs."""
    if size & (size - 1):
        raise BackendError(f"op='Adasum' needs 2, 4, 8, ... ranks, not {size}; use 'Average'")


def adasum(gradients: Sequence[Any]) -> Any:
    """All ranks' gradients combined, as in Horovod: rank 0 with 1, 2 with 3, then the pairs."""
    level = list(gradients)
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(a: Any, b: Any) -> Any:
    """``(1 - ab / 2aa) a + (1 - ab / 2bb) b``; sums in float64."""
    import tensorflow as tf

    x, y = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    both = tf.reduce_sum(x * y)
    of_x = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(x * x))
    of_y = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(y * y))
    return tf.cast(of_x * x + of_y * y, a.dtype)
