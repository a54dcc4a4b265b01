"""Models in the memory of this process' host, also where it has GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import keras_attributes, keras_variables, train_function
from tf_ooo.hosts.devices import host_device

if TYPE_CHECKING:
    import keras


@contextmanager
def host_memory() -> Iterator[None]:
    """A model that gets its weights inside has them, and later its optimizer's state, in this host's memory.

    >>> with tf_ooo.host_memory():
    ...     model = build()
    >>> model.compile("adam", "mse")
    >>> model.fit(x, y, callbacks=[tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=4))])

    For models that no device holds: a pipeline never runs a step of such a model on one device, not even to
    measure it (``first_steps="cut"``).
    """
    import tensorflow as tf

    def create(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        with tf.device(device):
            variable = next_creator(**arguments)
        keras_variables.mark_in_host_memory(variable)
        return variable

    device = host_device()
    with tf.device(device), tf.variable_creator_scope(create):
        yield


def in_host_memory(model: keras.Model) -> bool:
    """Whether the model was built in :func:`host_memory`."""
    values = map(keras_variables.value_of, model.weights)
    return any(keras_variables.is_in_host_memory(value) for value in values if value is not None)


def evaluate_in_host_memory(model: keras.Model) -> None:
    """From now on ``evaluate`` and ``predict`` of a model run on this host's CPU, where its weights are.

    TensorFlow would send all of them to the first GPU at once, at each batch.
    """
    for kind in ("test", "predict"):
        name = f"make_{kind}_function"
        if not hasattr(getattr(model, name), "on_host"):
            keras_attributes.set_on(
                model, name, _making_there(model, f"{kind}_function", getattr(model, name))
            )


def _making_there(model: keras.Model, kept_as: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' ``make_test_function`` or ``make_predict_function``, whose function runs on the CPU."""

    def make_there(*args: Any, **kwargs: Any) -> Any:
        made_by_keras = make(*args, **kwargs)
        function = train_function.functions_of(model)[kept_as]
        if not hasattr(function, "on_host"):
            function = _on_host(function)
            train_function.set_functions_of(model, {kept_as: function})
        return made_by_keras and function  # Keras 2 takes what is returned

    make_there.on_host = make  # type: ignore[attr-defined]
    return make_there


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    def call(given: Any) -> Any:
        with tf.device(host_device()):
            return function(given)

    call.on_host = function  # type: ignore[attr-defined]
    return call
