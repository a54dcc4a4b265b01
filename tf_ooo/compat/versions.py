"""Which TensorFlow and Keras are supported."""

from __future__ import annotations

from grappler_passes.plugin.compat import TOO_NEW as TOO_NEW_TENSORFLOW
from tf_ooo.errors import BackendError

# The plug-in alone also works with older ones, see there.
OLDEST_TENSORFLOW = (2, 21)


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
