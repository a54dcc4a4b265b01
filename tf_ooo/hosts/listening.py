"""Decides at which addresses the servers that TensorFlow starts can be reached.

They have no password: whoever can open the port can run anything there that TensorFlow can.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from tf_ooo.errors import BackendError
from tf_ooo.hosts.addresses import host_port
from tf_ooo.hosts.native import load


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches ``host:port``; true if the name is not known."""
    try:
        return ipaddress.ip_address(_ip(address)).is_loopback
    except OSError:
        return True


def _ip(address: str) -> str:
    host, port = host_port(address)
    ip = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    return str(ip).partition("%")[0]


@contextlib.contextmanager
def only_at(address: str) -> Iterator[None]:
    """A server of this ``host:port`` that TensorFlow starts in the block listens at that address alone.

    TensorFlow itself opens the port at all addresses of the machine.

    Raises:
        BackendError: it was opened at all addresses all the same, or this system cannot do it.
    """
    library, ip = load("_listening"), _ip(address)
    if library.ooo_listen_only(ip.encode(), host_port(address)[1]) <= 0:
        raise BackendError(
            f"cannot listen at {address} alone: TensorFlow opens ports in another way than it did"
        )
    try:
        yield
        if not library.ooo_narrowed():
            raise BackendError(
                f"{address} was opened at all addresses of this machine, and whoever reaches the port can "
                "run anything: end this process"
            )
    finally:
        library.ooo_listen_only(b"::", 0)
