"""XLA's flags for one compilation, in a process that has compiled before.

XLA reads ``XLA_FLAGS`` at its first use, but TensorFlow exports XLA's functions that read it again.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tf_ooo.errors import BackendError

_VARIABLE = "XLA_FLAGS"
# xla::ResetFlagValues(), xla::ParseDebugOptionFlagsFromEnv(bool reset_envvar): no C++ types in either.
_RESET, _PARSE = "_ZN3xla15ResetFlagValuesEv", "_ZN3xla28ParseDebugOptionFlagsFromEnvEb"
# CUDA wheels have them in the first, tensorflow-cpu in the second.
_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
_lock = threading.RLock()


def why_flags_are_fixed() -> str | None:
    """Say why this process cannot change XLA's flags any more; None where it can."""
    if _library() is None:
        return "this TensorFlow does not export what sets XLA's flags again; XLA read XLA_FLAGS at its start"
    return None


def flags_of_process() -> str:
    """Return the value of ``XLA_FLAGS``."""
    return os.environ.get(_VARIABLE, "")


@contextmanager
def added(flags: Sequence[str]) -> Iterator[None]:
    """Add flags to those of the process for everything that any thread compiles inside.

    XLA ends the process at a flag that it does not know: give only flags that TensorFlow 2.21 has.
    BackendError: flags cannot be changed.
    """
    library = _library()
    if library is None:
        raise BackendError(f"{' '.join(flags)}: {why_flags_are_fixed()}")
    with _lock:
        before = os.environ.get(_VARIABLE)
        try:
            _set(library, " ".join(filter(None, (before, *flags))))
            yield
        finally:
            _set(library, before)


def _set(library: ctypes.CDLL, text: str | None) -> None:
    if text is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = text
    library[_RESET]()
    library[_PARSE](True)


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            library[_RESET].restype = library[_PARSE].restype = None
            library[_PARSE].argtypes = [ctypes.c_bool]
        except (OSError, AttributeError):
            continue
        return library
    return None
