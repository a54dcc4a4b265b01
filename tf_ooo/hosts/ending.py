"""A process that has lost others ends, whatever its libraries wait for then."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import sys

# From the time when all that was registered for the end has run: Python frees a large model in less.
_FREE_S = 20.0


def end_in_time(free_s: float = _FREE_S) -> None:
    """Bounds the end of a script that has failed; to be called while it ends.

    TensorFlow may wait, with Python's lock held while it is freed, for a process that is gone, or that waits
    for this one.  ``free_s`` seconds after Python has begun to free what is left, the process prints where
    it stands, and ends with status 1.
    """

    def begin(phase: str, info: dict[str, int]) -> None:
        if sys.is_finalizing() and sys.__stderr__ is not None:
            with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
                faulthandler.dump_traceback_later(free_s, exit=True, file=sys.__stderr__)

    gc.callbacks.append(begin)
