"""Tracebacks of refusals: the user's own lines and the advice, without the lines between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import TracebackType

from tf_ooo.compat import versions
from tf_ooo.errors import OOOError

_INTERNAL = ("tf_ooo", "grappler_passes", "keras_callbacks", *versions.FRAMEWORKS)


def in_short(error: BaseException) -> BaseException:
    """Take the frames of this package, Keras and TensorFlow out of a refusal's traceback; return the error.

    Other errors keep theirs: a fault of ours is to be found.  So does everything after
    ``keras.config.disable_traceback_filtering()`` or ``tf.debugging.disable_traceback_filtering()``.
    """
    if isinstance(error, OOOError) and _filtering():
        kept: TracebackType | None = None
        for frame in reversed(list(_each(error.__traceback__))):
            if not _is_internal(frame):
                kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = kept
    return error


def _each(frame: TracebackType | None) -> Iterator[TracebackType]:
    while frame is not None:
        yield frame
        frame = frame.tb_next


def _is_internal(frame: TracebackType) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _INTERNAL


def _filtering() -> bool:
    """Return whether neither TensorFlow nor Keras was told to show all frames."""
    import tensorflow as tf

    keras_config = getattr(sys.modules.get("keras"), "config", None)
    asked = getattr(keras_config, "is_traceback_filtering_enabled", lambda: True)
    return bool(tf.debugging.is_traceback_filtering_enabled() and asked())
