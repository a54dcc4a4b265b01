"""Says with what, and on what, a step was trained: one line for reports."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras import Model

# Between the software and the device that it runs on.
ON = "; on "


def environment(model: Model | None = None) -> str:
    """Return versions and device; of the model's Keras, or of what ``tf.keras`` is.  Starts no GPU."""
    import tensorflow as tf

    from tf_ooo.compat import versions
    from tf_ooo.version import __version__

    keras = versions.user_keras() if model is None else versions.keras_of(model)
    name = "Keras" if keras.__name__ == "keras" else keras.__name__
    software = f"tf_ooo {__version__}, TensorFlow {tf.__version__}, {name} {keras.__version__}"
    device = f"CPU {platform.machine()}, {os.cpu_count()} cores"
    if gpus := tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpus[0])
        device = f"{len(gpus)} x {details.get('device_name', 'GPU')}"
    return f"{software}, Python {platform.python_version()}{ON}{device}"
