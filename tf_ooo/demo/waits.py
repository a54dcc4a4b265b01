"""Loads the library of the op OooWait, and reads its log of what ran when, without TensorFlow."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np

from tf_ooo.hosts.native import compiled

# The environment has a file's name under this: all processes of a run map that file.
LOG = "OOO_WAIT_LOG"
# These are wait.c's.
_RECORDS, _HEAD_BYTES, NAME_BYTES = 1 << 16, 256, 168
RECORD = np.dtype(
    [("arrived", "f8"), ("start", "f8"), ("end", "f8"), ("device", "S64"), ("name", f"S{NAME_BYTES}")]
)


def library() -> Path:
    """Return the file of the compiled op; BackendError: there is none."""
    return compiled(Path(__file__).with_name("_wait.so"), "the op of emulated devices, which is for Linux,")


class Log:
    """Reads the log that waits write into a file, which all processes of a run map."""

    def __init__(self, path: str) -> None:
        mapped = np.memmap(path, np.uint8, "r+", shape=(_HEAD_BYTES + _RECORDS * RECORD.itemsize,))
        self._scale, self._next = mapped[:8].view(np.float64), mapped[8:16].view(np.uint64)
        self._records = mapped[_HEAD_BYTES:].view(RECORD)
        self._read = 0

    def wait(self, scale: float) -> None:
        """Scale the seconds of all tasks by ``scale`` from now on; 0: no time."""
        self._scale[0] = scale

    def new(self) -> np.ndarray:
        """Return the records written since the last call."""
        first, self._read = self._read, int(self._next[0])
        return self._records[np.arange(first, self._read) % _RECORDS].copy()


def prefer() -> bool:
    """Give this process' threads priority, as an emulated device has a processor of its own.

    Otherwise waiting threads wake milliseconds late on a busy machine.  Returns False if not allowed.
    """
    for thread in os.listdir("/proc/self/task"):
        try:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            return False
    return True
