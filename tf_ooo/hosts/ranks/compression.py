"""What gradients travel as."""

from __future__ import annotations

from typing import Any


def compressed(tensor: Any, compression: str) -> Any:
    """The tensor cast to the 16-bit type of ``compression``; integers and 16-bit floats stay as they are."""
    import tensorflow as tf

    if compression == "none" or not tensor.dtype.is_floating or tensor.dtype.size <= 2:
        return tensor
    return tf.cast(tensor, tf.float16 if compression == "fp16" else tf.bfloat16)


def restored(tensor: Any, like: Any) -> Any:
    """The tensor cast back to the type of ``like``."""
    import tensorflow as tf

    return tensor if tensor.dtype == like.dtype else tf.cast(tensor, like.dtype)
