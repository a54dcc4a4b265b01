"""Calls the steps of ``evaluate`` and ``predict`` one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from tf_ooo.compat import iterators, keras_attributes, train_function, versions

if TYPE_CHECKING:
    import keras

Kind = Literal["test", "predict"]


def makes_its_own(model: keras.Model, kind: Kind) -> bool:
    """Return whether the model's class has its own ``make_test_function`` or ``make_predict_function``."""
    made_by = getattr(type(model), f"make_{kind}_function").__module__
    return made_by.partition(".")[0] not in ("keras", "tf_keras")


def step_on_data(model: keras.Model, kind: Kind) -> Callable[[Any], Any]:
    """Return Keras' test or predict step for one batch, not made into a ``tf.function``."""
    step = getattr(model, f"{kind}_step")
    on_data = train_function.step_on_data(model, step, counts=False)
    if not versions.is_of_keras_2(model):
        return on_data
    counter = getattr(model, f"_{kind}_counter")

    def counted(data: object) -> Any:
        outputs = on_data(data)
        with tf.control_dependencies([value for value in tf.nest.flatten(outputs) if tf.is_tensor(value)]):
            counter.assign_add(1)
        return outputs

    return counted


def why_not_of_outputs(model: keras.Model) -> str:
    """Say why a test step may need more than a batch's outputs; empty: Keras' own needs these alone."""
    if versions.is_of_keras_2(model):
        return "that is for Keras 3"
    for name in ("test_step", "predict_step", "__call__"):
        if getattr(type(model), name).__module__.partition(".")[0] != "keras":
            return f"{type(model).__name__} has a {name} of its own"
    return ""


def outputs_on_data(model: keras.Model, noted: list[str]) -> Callable[[Any], Any]:
    """The forward pass of a test step on one batch.

    What goes with the outputs to the loss, other than labels, is ``noted`` when it is traced.
    """
    on_data = step_on_data(model, "predict")

    def outputs_of(data: object) -> Any:
        outputs = on_data(data)
        if any(getattr(tensor, "_keras_mask", None) is not None for tensor in tf.nest.flatten(outputs)):
            noted.append("masks go with the model's outputs")
        if model.losses:
            noted.append("the model adds losses of its own (regularizers, add_loss)")
        return outputs

    return outputs_of


def rest_of_test_step(model: keras.Model) -> Callable[[Any, Any], Any]:
    """Given a batch and the model's outputs for it: the loss and metrics, as the test step on that batch."""
    on_data = step_on_data(model, "test")

    def rest(data: object, outputs: object) -> Any:
        keras_attributes.shadow(model, "call", lambda *args, **kwargs: outputs)
        try:
            return on_data(data)
        finally:
            keras_attributes.unshadow(model, "call")

    return rest


def batches_of(model: keras.Model, kind: Kind, given: Any) -> tuple[list[Any], Any]:
    """The batches that one call of a test or predict function takes, and their spec; None: as they are.

    ``given``: what Keras calls it with, an iterator; Keras 3's ``predict`` takes the batches itself.
    """
    if kind == "predict" and isinstance(given, list):
        return given, None
    spec = given.element_spec if iterators.is_iterator(given) else None
    return iterators.take(given, train_function.steps_per_execution(model)), spec


def given_again(given: object, batches: list[Any]) -> Any:
    """Return the argument to call Keras' function with once :func:`batches_of` has taken these."""
    if given is batches:
        return given
    return iterators.iterator_over(batches, given) if iterators.is_iterator(given) else iter(batches)


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of ``predict`` for several batches, as one, as Keras joins them."""
    if len(outputs) == 1:
        return outputs[0]

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        return tf.concat(parts, 0) if parts[0].shape.rank else tf.stack(parts)

    return tf.nest.map_structure(join, *outputs)
