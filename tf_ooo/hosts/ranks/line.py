"""Keeps a connection between two ranks, and knows whether the other end is still alive."""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tf_ooo.errors import BackendError
from tf_ooo.hosts.native import load

_PULSE_S = 2.0
_LONGEST_BYTES = 1 << 20


class Line:
    """Sends a JSON object in each line; an empty line says that the process at the other end lives.

    Attributes:
        heard: how many lines have come.
        pulses: whether empty ones come.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.heard, self.pulses = 0, False
        self._connection, self._read = connection, connection.makefile("rb")
        self._sending = threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; nothing happens if nobody is there."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None: the other end is gone, silent for ``limit_s``, or not a rank."""
        self._connection.settimeout(limit_s)
        with contextlib.suppress(OSError, ValueError):
            while (line := self._read.readline(_LONGEST_BYTES)) == b"\n":
                self.heard, self.pulses = self.heard + 1, True
            self.heard += 1
            message = json.loads(line)
            return message if isinstance(message, dict) else None
        return None

    def keep_alive(self) -> None:
        """Have a thread of C send empty lines until the end of the process.

        Reading data may hold Python's lock for minutes, in which no thread of Python runs.
        """
        with contextlib.suppress(BackendError):  # not compiled: then this end's silence says nothing
            load("_silence").ooo_pulse(self.descriptor, ctypes.c_double(_PULSE_S))

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._read.close()
        self._connection.close()


def can_keep_alive() -> bool:
    """Return whether this process can send empty lines: the library is compiled."""
    with contextlib.suppress(BackendError):
        return bool(load("_silence"))
    return False


class Attention:
    """Measures how long the other ends have been silent while this process listened.

    It is asked several times a second.  Longer pauses are this process' own, such as Ctrl-Z, and do not
    count.

    Attributes:
        SILENCE_S: a rank silent for so long is stopped, or cannot be reached.
    """

    SILENCE_S = 30.0
    _LONGEST_PAUSE_S = 1.0

    def __init__(self, lines: Mapping[int, Line]) -> None:
        self._lines = lines
        self._heard = dict.fromkeys(lines, -1)
        self._silent_s = dict.fromkeys(lines, 0.0)
        self._asked_s = time.monotonic()

    def silent(self) -> list[int]:
        """Return the ranks that have been silent for too long."""
        now_s = time.monotonic()
        passed_s, self._asked_s = min(now_s - self._asked_s, self._LONGEST_PAUSE_S), now_s
        for rank, line in self._lines.items():
            quiet = line.pulses and line.heard == self._heard[rank]
            self._silent_s[rank] = self._silent_s[rank] + passed_s if quiet else 0.0
            self._heard[rank] = line.heard
        return [rank for rank, silent_s in self._silent_s.items() if silent_s >= self.SILENCE_S]


@contextlib.contextmanager
def ending_without(
    lines: Mapping[int, Line], texts: Mapping[int, tuple[str, str | None]], wait_s: float
) -> Iterator[None]:
    """End this process ``wait_s`` after another rank is lost in the block, even if Python's lock is held.

    ``texts``: messages for each rank if it has gone, and if it is silent; None: its silence is ignored.
    """
    try:
        library = load("_silence")
    except BackendError:  # not compiled: then the wait may have no end
        yield
        return
    said: list[bytes | None] = []
    for rank in lines:
        told = [json.dumps({"from": rank, what: True}) for what in ("gone", "silent")]
        said += [None if text is None else f"{text}\n".encode() for text in (*texts[rank], *told)]
    descriptors = (ctypes.c_int * len(lines))(*(line.descriptor for line in lines.values()))
    silence_s, seconds = ctypes.c_double(Attention.SILENCE_S), ctypes.c_double(wait_s)
    library.ooo_need.restype = ctypes.c_void_p
    all_texts = (ctypes.c_char_p * len(said))(*said)
    needed = library.ooo_need(descriptors, all_texts, len(lines), silence_s, seconds)
    try:
        yield
    finally:
        library.ooo_needed_no_more(ctypes.c_void_p(needed))
