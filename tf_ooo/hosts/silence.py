"""Workers that are silent, noticed by threads of C: TensorFlow waits for workers with Python's lock held."""

from __future__ import annotations

import ctypes
import socket
from functools import cache

from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import host_port
from tf_ooo.hosts.native import load


class Silence:
    """Watches workers until the end of the process, or until :meth:`stop`.

    One that does not greet for ``silence_s`` seconds is silent: this process' connections to it are closed
    every second from then on, so that whatever waits for it fails.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._peers: dict[int, int] = {}

    def watch(self, task: int, address: str) -> None:
        """A worker more.  BackendError: the library is not compiled, or there is no thread left."""
        peer = _library().ooo_watch(*_where(address), ctypes.c_double(self.silence_s))
        if peer is None:
            raise BackendError(f"worker {address} cannot be watched: this process can start no thread")
        self._peers[task] = peer

    def text(self) -> str:
        """Say that a task is silent."""
        return f"it has not answered for {self.silence_s:.0f} s"

    def tasks(self) -> list[int]:
        """Return the tasks that are silent."""
        return [task for task, peer in self._peers.items() if _library().ooo_silent(peer)]

    def stop(self) -> None:
        """Nobody is silent any more."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            _library().ooo_unwatch(peer)


def cut(address: str) -> int:
    """Closes this process' TCP connections to an address; returns how many.

    What waits for an answer from there fails now.  TensorFlow has no deadline for its remote calls, and
    asking it whether a worker lives blocks all of Python if that worker is silent.
    """
    closed: int = _library().ooo_cut(*_where(address))
    return closed


def _where(address: str) -> tuple[ctypes.Array[ctypes.c_char_p], int, int]:
    """IP addresses, how many, and the port; none where the name is not known."""
    host, port = host_port(address)
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        known = []
    hosts = [str(info[4][0]).partition("%")[0].encode() for info in known]
    return (ctypes.c_char_p * len(hosts))(*hosts), len(hosts), port


@cache
def _library() -> ctypes.CDLL:
    library = load("_silence")
    library.ooo_watch.restype = ctypes.c_void_p
    for name in ("ooo_silent", "ooo_unwatch"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.ooo_unwatch.restype = None
    return library
