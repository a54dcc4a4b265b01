"""Checks that TensorFlow and Keras are supported, and finds the Keras that an object belongs to."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from grappler_passes.compat import releases
from tf_ooo.errors import BackendError

if TYPE_CHECKING:
    import keras

_FAMILIES = ("keras", "tf_keras")
# Our tracebacks leave out lines of these modules.
FRAMEWORKS = ("tensorflow", *_FAMILIES)
OLDEST_KERAS = (2, 15)


def check_versions() -> None:
    """Raise BackendError, naming the version and the way out, outside the supported range."""
    if (reason := releases.why_unsupported()) is not None:
        raise BackendError(reason)


def check_keras_backend(model: keras.Model = None) -> None:
    """Raise BackendError unless the model's Keras (:func:`user_keras` without a model) is supported."""
    keras = user_keras() if model is None else keras_of(model)
    if releases.major_minor(keras.__version__) < OLDEST_KERAS:
        raise BackendError(
            f"Keras {keras.__version__} is not supported; pip install 'keras>=3', or keras==2.15.0 with "
            "TensorFlow 2.15"
        )
    if keras.backend.backend() != "tensorflow":
        raise BackendError(f"Keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow")


def keras_of(value: object) -> Any:
    """Return the module that the class of ``value`` comes from, ``keras`` or ``tf_keras``; else ``keras``."""
    for base in type(value).__mro__:
        family = base.__module__.partition(".")[0]
        if family in _FAMILIES and family in sys.modules:
            return sys.modules[family]
    import keras

    return keras


def loaded_keras() -> list[Any]:
    """Return the imported Keras modules; one that is not imported cannot have made anything."""
    return [sys.modules[family] for family in _FAMILIES if hasattr(sys.modules.get(family), "layers")]


def is_keras_2(keras: Any) -> bool:
    """Return whether a Keras module is of version 2, as ``tf_keras`` always is."""
    return releases.major_minor(keras.__version__) < (3, 0)


def is_of_keras_2(value: object) -> bool:
    """Return whether a model, an optimizer or a layer comes from a Keras of version 2."""
    return is_keras_2(keras_of(value))


def user_keras() -> Any:
    """Return the Keras behind ``tf.keras``: ``tf_keras`` if TF_USE_LEGACY_KERAS says so, else ``keras``."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        try:
            import tf_keras
        except ImportError as error:
            raise BackendError(
                f"TF_USE_LEGACY_KERAS=1, and tf_keras cannot be imported ({error}): {_install_tf_keras()}"
            ) from error
        return tf_keras
    import keras

    return keras


def _install_tf_keras() -> str:
    """Say how to install tf_keras alone: it requires ``tensorflow``, even beside ``tensorflow-cpu``."""
    import tensorflow as tf

    return "pip install --no-deps 'tf_keras=={}.{}.*'".format(*releases.major_minor(tf.__version__))
