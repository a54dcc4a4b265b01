"""TensorFlow's and Keras' private API of the pipeline mode, each with a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from grappler_passes.microbatches import SUM_ATTR

# What Grappler's arithmetic optimizer writes on sums that it has looked at: with it, a chain of sums stays
# a chain.  Else it becomes one AddN, which keeps the gradients of all micro-batches alive to the end.
_LEAVE_SUMS = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


@contextlib.contextmanager
def marked_sums() -> Iterator[None]:
    """Ops made inside are sums of gradients, which Grappler leaves as they are."""
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    yes = attr_value_pb2.AttrValue(b=True)
    with tf.compat.v1.get_default_graph()._attr_scope({SUM_ATTR: yes, _LEAVE_SUMS: yes}):
        yield


def value_of(variable: Any) -> Any:
    """The ``tf.Variable`` behind a Keras variable."""
    return variable._value


def set_value_of(variable: Any, value: Any) -> None:
    """Puts another ``tf.Variable`` behind a Keras variable."""
    object.__setattr__(variable, "_value", value)


def copy_on(device: str, variable: Any) -> Any:
    """A new ``tf.Variable`` on a device with the value and the identity of another one.

    Optimizers of Keras know the variables that they were built with by ``_unique_id``.
    """
    import tensorflow as tf

    with tf.init_scope(), tf.device(device):
        new = tf.Variable(
            variable.read_value(),
            trainable=variable.trainable,
            dtype=variable.dtype,
            shape=variable.shape,
            name=variable.name.split(":")[0],
            synchronization=variable.synchronization,
            aggregation=variable.aggregation,
        )
    new._unique_id = variable._unique_id
    return new


def functions_of(model: Any) -> dict[str, Any]:
    """The functions that a model keeps for evaluate and predict."""
    return {name: getattr(model, name, None) for name in ("test_function", "predict_function")}


def set_functions_of(model: Any, functions: dict[str, Any]) -> None:
    """Sets what :func:`functions_of` gave; None: to be made anew."""
    for name, function in functions.items():
        setattr(model, name, function)


def make_on_demand(function: Any) -> Any:
    """A ``tf.function`` without autograph; TensorFlow does not warn that there are several."""
    import tensorflow as tf

    made = tf.function(tf.autograph.experimental.do_not_convert(function))
    made._omit_frequent_tracing_warning = True
    return made


def batch_normalizations(model: Any) -> list[str]:
    """Paths of the layers that normalize over the rows of a batch."""
    import keras

    layers = model._flatten_layers(include_self=False, recursive=True)
    return [layer.path for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def summed_losses(model: Any) -> list[str]:
    """Names of the losses given to ``compile`` that add up a batch instead of averaging it."""
    import keras

    losses = keras.tree.flatten(getattr(model, "loss", None))
    return [x.name for x in losses if isinstance(x, keras.losses.Loss) and x.reduction == "sum"]
