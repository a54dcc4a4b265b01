"""Defines the errors that users see. All derive from :class:`OOOError`, also those that the passes raise."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from grappler_passes.errors import GraphError, PassError
from grappler_passes.errors import GrapplerPassError as OOOError
from tf_ooo.units import bytes_text

__all__ = [
    "BackendError",
    "CostError",
    "GraphError",
    "MemoryLimitError",
    "OOOError",
    "OptionsError",
    "PassError",
    "ScheduleError",
]


class OptionsError(OOOError, ValueError):
    """An option has an unknown name or a value that is not accepted."""


class CostError(OOOError, ValueError):
    """Costs are missing, negative or not a number; the message names the layer or the op."""


class ScheduleError(OOOError, ValueError):
    """A schedule is malformed, has a cycle, or lacks a task; the message names the task."""


class MemoryLimitError(OOOError):
    """No order stays within ``memory_limit_bytes``.

    ``smallest_bytes`` is the lowest limit that can be kept, None where sizes are not known; the ops
    of unknown size are in ``unknown``.  ``because``: the part that no division of the work makes smaller.
    ``said``: where the limit comes from, if nobody asked for it.
    """

    def __init__(
        self,
        limit_bytes: int,
        smallest_bytes: int | None,
        unknown: Sequence[str] = (),
        because: str = "",
        said: str = "",
    ) -> None:
        why = _why_not(smallest_bytes, unknown) + (f"; {because}" if because else "")
        super().__init__(f"memory_limit_bytes={limit_bytes}{_in_brackets(limit_bytes, said)}: {why}")
        self.unknown, self.because = tuple(unknown), because
        self.limit_bytes, self.smallest_bytes = limit_bytes, smallest_bytes


def _why_not(smallest_bytes: int | None, unknown: Sequence[str]) -> str:
    if unknown:
        return (
            f"the sizes of {len(unknown)} tensors are not known before the step runs, first {unknown[0]!r}; "
            "give inputs of fixed shape, or on one device batch_size= (rows of one batch); a loop's lists of "
            "tensors have no known size on one device (Keras' RNN layers: unroll=True), and in a pipeline "
            "where it is not known how often the loop runs"
        )
    return (
        f"even the lowest peak needs {smallest_bytes} bytes{_in_brackets(smallest_bytes)}; "
        f"raise the limit to at least {smallest_bytes} or use a smaller batch"
    )


def _in_brackets(count: int | None, said: str = "") -> str:
    """Return `` (128.9 MB; a worker says so)``; empty if bytes read well and there is no text."""
    size = bytes_text(count) if count is not None and count >= 10**6 else ""
    texts = "; ".join(filter(None, (size, said)))
    return f" ({texts})" if texts else ""


class BackendError(OOOError):
    """TensorFlow, Keras or the plug-in cannot do what is asked on this machine."""


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Say why a file cannot be read, without repeating what the caller says."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text in UTF-8 (byte {error.start})"
    return error.strerror or str(error)


def did_you_mean(value: str, accepted: Iterable[str]) -> str:
    """Return a question, in brackets, if one of the accepted texts is close; else an empty text."""
    close = difflib.get_close_matches(value, list(accepted), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
