"""What the networks of ``tf-ooo bench single`` are fed with.

``random``: one batch of random numbers, on the device all the time.  ``real``: hand-written digits through
a ``tf.data`` pipeline, another batch each step, as a user would feed them.

The digits are those of ``tf-ooo demo`` (:mod:`tf_ooo.cli.digits`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

KINDS = ("random", "real")
DIGITS = Path(__file__).parents[2] / "cli" / "data" / "digits.npz"


def digits() -> tuple[np.ndarray, np.ndarray]:
    """(images of shape (1797, 8, 8), 0 to 1; their digits)."""
    with np.load(DIGITS) as stored:
        return stored["x"].astype("float32") / 16, stored["y"].astype("int32")


def resized(images: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Images (n, 8, 8) as (n, height, width) or (n, height, width, channels), nearest neighbours.

    A sequence of vectors is an image of one channel: its length is the height.
    """
    rows, columns = (np.arange(size) * 8 // size for size in shape[:2])
    large = images[:, rows][:, :, columns]
    return large if len(shape) == 2 else np.repeat(large[..., None], shape[2], axis=-1)


def batches(
    shape: Sequence[int], count: int, classes: int, kind: str
) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Endless (inputs of shape (count, *shape), labels (count,)) for TensorFlow."""
    if kind == "random":
        return itertools.repeat(_random(shape, count, classes))
    return iter(dataset(shape, count, classes, kind))


def _random(shape: Sequence[int], count: int, classes: int) -> tuple[tf.Tensor, tf.Tensor]:
    import tensorflow as tf

    tf.random.set_seed(1)
    x = tf.random.normal((count, *shape))
    return x, tf.random.uniform((count,), 0, classes, tf.int32)


def dataset(shape: Sequence[int], count: int, classes: int, kind: str) -> tf.data.Dataset:
    """The same as an endless ``tf.data.Dataset``."""
    import tensorflow as tf

    if kind == "random":
        return tf.data.Dataset.from_tensors(_random(shape, count, classes)).repeat().prefetch(2)
    images, labels = digits()
    source = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=1).repeat()

    def enlarge(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        large = tf.image.resize(x[..., None], shape[:2], method="nearest")
        return (large[..., 0] if len(shape) == 2 else tf.repeat(large, shape[2], axis=-1)), y

    enlarged = source.batch(count, drop_remainder=True).map(enlarge, tf.data.AUTOTUNE)
    return enlarged.prefetch(tf.data.AUTOTUNE)


def arrays(
    shape: Sequence[int], count: int, classes: int, kind: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The same as numpy arrays, channels last."""
    rng = np.random.default_rng(1)
    if kind == "random":
        x = rng.normal(size=(count, *shape)).astype("float32")
        yield from itertools.repeat((x, rng.integers(0, classes, count)))
    images, labels = digits()
    while True:
        chosen = rng.permutation(len(images))[:count]
        yield resized(images[chosen], shape), labels[chosen].astype("int64")
