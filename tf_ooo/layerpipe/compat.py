"""TensorFlow's private API of this mode, each with a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def concrete_function(function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """The ConcreteFunction of ``function(*specs)``; raises whatever tracing raises."""
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(function), autograph=False)
    made._omit_frequent_tracing_warning = True
    return made.get_concrete_function(*specs)


def open_rows(spec: Any) -> Any:
    """The TensorSpec of batches with any number of rows."""
    import tensorflow as tf

    shape = spec.shape.as_list() if spec.shape.rank else spec.shape
    return tf.TensorSpec([None, *shape[1:]] if spec.shape.rank else shape, spec.dtype)


def handle_of(variable: Any) -> Any:
    """The resource of a ``tf.Variable``."""
    return variable.handle


def register(dtype: Any, device: str) -> Any:
    """A variable of any shape that holds nothing yet."""
    import tensorflow as tf

    with tf.init_scope(), tf.device(device):
        return tf.Variable(
            tf.zeros([0], dtype), shape=tf.TensorShape(None), trainable=False, validate_shape=False
        )


def function(body: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """A ``tf.function`` for these inputs, without autograph; TensorFlow does not warn that there are several.

    Traced for batches of one size, graph optimizers would take the rows of the batch that comes in for those
    of the one before: they give a variable of any shape the shape of what is assigned to it.
    """
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(body), input_signature=list(specs), autograph=False)
    made._omit_frequent_tracing_warning = True
    return made

