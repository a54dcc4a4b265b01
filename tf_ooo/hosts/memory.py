"""Builds models in the memory of this process' host, even if it has GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grappler_passes.compat import runtime
from tf_ooo.compat import keras_layers, keras_variables, train_function
from tf_ooo.errors import BackendError
from tf_ooo.hosts.devices import host_device
from tf_ooo.hosts.system_memory import ReportedLimit, available_bytes

if TYPE_CHECKING:
    import keras

# Smaller variables are not looked at one by one; so much is left for everything else.
_LARGE_BYTES, _LEFT_BYTES = 1 << 20, 32 << 20


@contextmanager
def host_memory() -> Iterator[None]:
    """Put weights that are made in the block, and later their optimizer's state, in this host's memory.

    >>> with tf_ooo.host_memory():
    ...     model = build()
    >>> model.compile("adam", "mse")
    >>> model.fit(x, y, callbacks=[tf_ooo.OOOBackprop(tf_ooo.Pipeline(devices=4))])

    It is for models that no device can hold: a pipeline never runs a step of such a model on one device, not
    even to measure it (``first_steps="cut"``).

    Raises:
        BackendError: a weight exceeds this process' remaining memory, where Linux would end the process.
    """
    import tensorflow as tf

    there_bytes = 0

    def create(next_creator: Callable[..., Any], **arguments: Any) -> Any:
        nonlocal there_bytes
        with tf.device(device):
            variable = next_creator(**arguments)
        own_bytes = int(variable.shape.num_elements() or 0) * int(variable.dtype.size)  # 0: its shape is open
        _check_room(variable.name, own_bytes, there_bytes)
        there_bytes += own_bytes
        keras_variables.mark_in_host_memory(variable)
        return variable

    device = host_device()
    with tf.device(device), tf.variable_creator_scope(create):
        yield


def _check_room(name: str, own_bytes: int, there_bytes: int) -> None:
    """Raise BackendError if there is no room for another such variable and its first value beside it."""
    available = available_bytes() if own_bytes >= _LARGE_BYTES else None
    if available is not None and available.bytes <= own_bytes + _LEFT_BYTES:
        raise BackendError(
            f"tf_ooo.host_memory(): {there_bytes} bytes of weights are there, and {own_bytes} more for "
            f"{name.removesuffix(':0')!r} are too many: {available.bytes} bytes are {available.said}; build "
            "the model on a machine, or in a group, with more memory"
        )


def in_host_memory(model: keras.Model) -> bool:
    """Return whether the model was built in :func:`host_memory`."""
    values = map(keras_variables.value_of, model.weights)
    return any(keras_variables.is_in_host_memory(value) for value in values if value is not None)


def evaluate_in_host_memory(model: keras.Model) -> None:
    """Have ``evaluate`` and ``predict`` of a model run on this host's CPU, where its weights are.

    TensorFlow would send all of them to the first GPU at once, at each batch.
    """
    for kind in ("test", "predict"):
        name = f"make_{kind}_function"
        make = getattr(model, name)
        if not hasattr(make, "on_host"):
            keras_layers.set_on(model, name, _making_there(model, f"{kind}_function", make))


def _making_there(model: keras.Model, kept_as: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras' ``make_test_function`` or ``make_predict_function``, changed to run on the CPU."""

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

    def call(given: object) -> Any:
        with tf.device(host_device()):
            return function(given)

    call.on_host = function  # type: ignore[attr-defined]
    return call


def limits_of_gpus(devices: Sequence[str]) -> dict[str, ReportedLimit]:
    """Return the bytes that TensorFlow may use of the GPUs among these devices, by full name.

    CPUs are left out, as TensorFlow reports no real limit for them.
    """
    gpus = [name for name in devices if ":GPU:" in name]
    sizes = runtime.device_memory_bytes() if gpus else {}
    said = "TensorFlow may use so many of {}"
    return {gpu: ReportedLimit(sizes[gpu], said.format(gpu)) for gpu in gpus if sizes.get(gpu, 0) > 0}
