"""The errors that users see.  All derive from :class:`OOOError`, also those that the passes raise."""

from __future__ import annotations

from grappler_passes.errors import GraphError
from grappler_passes.errors import GrapplerPassError as OOOError

__all__ = ["BackendError", "GraphError", "MemoryLimitError", "OOOError", "OptionsError", "ScheduleError"]


class OptionsError(OOOError, ValueError):
    """An option has an unknown name or a value that is not accepted."""


class ScheduleError(OOOError, ValueError):
    """A schedule is malformed, has a cycle, or lacks a task; the message names the task."""


class MemoryLimitError(OOOError):
    """No order stays within ``memory_limit_bytes``.

    ``smallest_bytes`` is the lowest limit that can be kept.
    """

    def __init__(self, limit_bytes: int, smallest_bytes: int) -> None:
        super().__init__(
            f"memory_limit_bytes={limit_bytes}: even the lowest peak needs {smallest_bytes} bytes; "
            f"raise the limit to at least {smallest_bytes} or use a smaller batch"
        )
        self.limit_bytes = limit_bytes
        self.smallest_bytes = smallest_bytes


class BackendError(OOOError):
    """TensorFlow, Keras or the plug-in cannot do what is asked on this machine."""
