"""Loads small C libraries, which setup.py compiles; bounds the end of a process that has lost others."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from functools import cache
from pathlib import Path

from tf_ooo.errors import BackendError


def compiled(path: Path, who: str) -> Path:
    """Return the path of a library that setup.py compiles; BackendError: it is not compiled."""
    if not path.exists():
        raise BackendError(f"{who} is not compiled; install a C compiler, then reinstall with: pip install .")
    return path


@cache
def load(name: str) -> ctypes.CDLL:
    """Return a library of this room; BackendError: it is not compiled."""
    path = Path(__file__).with_name(f"{name}.so")
    return ctypes.CDLL(str(compiled(path, f"{name}, which several hosts need,")))


# From the time when all that was registered for the end has run: Python frees a large model in less.
_FREE_S = 20.0


def end_in_time(free_s: float = _FREE_S) -> None:
    """Bound the end of a script that has failed; to be called while it ends.

    TensorFlow may wait, with Python's lock held while it is freed, for a process that is gone, or that waits
    for this one.  ``free_s`` seconds after Python has begun to free what is left, a thread of C says so and
    ends the process with status 1.
    """
    with contextlib.suppress(BackendError):  # not compiled: then there is no bound
        library = load("_silence")
        library.ooo_end_in_time(ctypes.c_double(free_s))
        freeing = library.ooo_freeing
        gc.callbacks.append(lambda phase, info: freeing() if sys.is_finalizing() else None)
