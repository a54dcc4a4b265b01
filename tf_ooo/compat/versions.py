"""Which TensorFlow and Keras are supported, and which Keras something belongs to."""

from __future__ import annotations

import os
import sys
from typing import Any

from grappler_passes.plugin.compat import OLDEST as OLDEST_TENSORFLOW
from grappler_passes.plugin.compat import TOO_NEW as TOO_NEW_TENSORFLOW
from tf_ooo.errors import BackendError

_FAMILIES = ("keras", "tf_keras")
OLDEST_KERAS = (2, 15)


def check_versions() -> None:
    """Raises BackendError, naming the version and the way out, outside the supported range."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise BackendError(
            f"TensorFlow cannot be imported ({error}); pip install 'tf_ooo[cpu]' or 'tf_ooo[gpu]'"
        ) from error
    if not OLDEST_TENSORFLOW <= _version(tf.__version__) < TOO_NEW_TENSORFLOW:
        oldest, too_new = (f"{major}.{minor}" for major, minor in (OLDEST_TENSORFLOW, TOO_NEW_TENSORFLOW))
        raise BackendError(
            f"TensorFlow {tf.__version__} is not supported; pip install 'tensorflow>={oldest},<{too_new}'"
        )


def check_keras_backend(model: Any = None) -> None:
    """Raises BackendError unless the model's Keras (``keras`` without one) is supported, on TensorFlow."""
    keras = keras_of(model)
    if _version(keras.__version__) < OLDEST_KERAS:
        raise BackendError(
            f"Keras {keras.__version__} is not supported; pip install 'keras>=3', or keras==2.15.0 with "
            "TensorFlow 2.15"
        )
    if keras.backend.backend() != "tensorflow":
        raise BackendError(f"Keras runs on {keras.backend.backend()!r}; set KERAS_BACKEND=tensorflow")


def keras_of(value: Any) -> Any:
    """The module, ``keras`` or ``tf_keras``, that the class of ``value`` comes from; ``keras`` if none."""
    for base in type(value).__mro__:
        family = base.__module__.partition(".")[0]
        if family in _FAMILIES and family in sys.modules:
            return sys.modules[family]
    import keras

    return keras


def loaded_keras() -> list[Any]:
    """The Keras modules that have been imported; one that is not can have made nothing."""
    return [sys.modules[family] for family in _FAMILIES if hasattr(sys.modules.get(family), "layers")]


def is_keras_2(keras: Any) -> bool:
    """Whether a Keras module is of version 2, as ``tf_keras`` always is."""
    return _version(keras.__version__) < (3, 0)


def user_keras() -> Any:
    """What ``tf.keras`` is: ``tf_keras`` where TF_USE_LEGACY_KERAS asks for it, else ``keras``."""
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        try:
            import tf_keras
        except ImportError as error:
            raise BackendError(
                "TF_USE_LEGACY_KERAS=1, and tf_keras is not installed: pip install tf_keras"
            ) from error
        return tf_keras
    import keras

    return keras


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
