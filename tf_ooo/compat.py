"""Every TensorFlow and Keras version check and private API of ``tf_ooo``, each with a test.

Seen working on TensorFlow 2.21 and Keras 3.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_ooo.errors import BackendError

OLDEST_TENSORFLOW = (2, 21)
TOO_NEW_TENSORFLOW = (2, 22)


def check_versions() -> None:
    """Raises BackendError, naming the version and the way out, outside the supported range."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise BackendError(
            f"TensorFlow cannot be imported ({error}); pip install 'tf_ooo[cpu]' or 'tf_ooo[gpu]'"
        ) from error
    if not OLDEST_TENSORFLOW <= _version(tf.__version__) < TOO_NEW_TENSORFLOW:
        raise BackendError(
            f"TensorFlow {tf.__version__} is not supported; pip install 'tensorflow>=2.21,<2.22'"
        )


def check_keras_backend() -> None:
    """Raises BackendError unless Keras is version 3 on TensorFlow."""
    import keras

    if _version(keras.__version__) < (3, 0):
        raise BackendError(f"Keras {keras.__version__} is not supported; pip install 'keras>=3'")
    if keras.backend.backend() != "tensorflow":
        raise BackendError(f"Keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow")


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def train_function_of(model: Any) -> Callable[..., Any]:
    """The function that ``fit`` calls for each batch; makes it if there is none."""
    if model.train_function is None:
        model.make_train_function()
    function: Callable[..., Any] = model.train_function
    return function


def new_train_function(model: Any) -> Callable[..., Any]:
    """A second, untraced train function; the model keeps its first one."""
    kept = model.train_function
    try:
        model.train_function = None
        model.make_train_function()
        function: Callable[..., Any] = model.train_function
        return function
    finally:
        model.train_function = kept


def why_not_rewritable(model: Any) -> str | None:
    """Why no graph of this model's step can be rewritten; None where one can."""
    if model.run_eagerly:
        return "run_eagerly=True: every op runs at once, there is no graph to rewrite"
    if model.jit_compile is True:
        return "jit_compile=True: XLA compiles the step, TensorFlow's graph optimizers see one opaque call"
    # A model without any weights is not built yet: its first step builds it.
    if model.weights and not model.trainable_weights:
        return "the model has no trainable weights: there is no backward pass to reorder"
    return None


def is_concrete_function(value: Any) -> bool:
    """Whether ``value`` is a traced tf.function."""
    return (
        hasattr(value, "graph") and hasattr(value, "captured_inputs") and hasattr(value, "structured_outputs")
    )


def synchronize(outputs: Any) -> None:
    """Waits until all tensors of a nest are computed (a GPU runs behind the Python program)."""
    import tensorflow as tf

    for value in tf.nest.flatten(outputs):
        if hasattr(value, "numpy"):
            value.numpy()


def install_train_function(model: Any, ours: Callable[..., Any], stock: Callable[..., Any]) -> None:
    """Makes ``fit`` call ``ours`` until :func:`remove_train_function` or the next ``fit``.

    ``fit`` begins with ``make_train_function()`` and skips ``on_train_end`` when training raises, so
    the model's ``make_train_function`` is shadowed by one that first puts ``stock`` back.
    """
    make = model.make_train_function

    def restore_and_make(*args: Any, **kwargs: Any) -> Any:
        remove_train_function(model)
        return make(*args, **kwargs)

    restore_and_make.ooo = (ours, stock)  # type: ignore[attr-defined]
    object.__setattr__(model, "make_train_function", restore_and_make)
    model.train_function = ours


def remove_train_function(model: Any) -> None:
    """Undoes :func:`install_train_function`; keeps a train function that was set in between."""
    shadow = vars(model).get("make_train_function")
    if shadow is None or not hasattr(shadow, "ooo"):
        return
    object.__delattr__(model, "make_train_function")
    ours, stock = shadow.ooo
    if model.train_function is ours:
        model.train_function = stock
