"""Notices who is silent without Python: servers and connections of this process."""

from __future__ import annotations

import contextlib
import ctypes
import select
import signal
import socket
import sys
import threading
import time

import pytest

from tests import forked
from tf_ooo.hosts.watch import Silence, cut

SILENCE_S = 0.5
# A wait for what comes within a second fails after so long.
LIMIT_S = 20.0


def has_ipv6():
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


HOSTS = ["127.0.0.1", "localhost", *(["::1"] if has_ipv6() else [])]


class PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def wait_with_pythons_lock(connection):
    """Return whether there is something to be read, or the end; no thread of Python runs meanwhile."""
    waiting = PollFd(connection.fileno(), select.POLLIN, 0)
    return ctypes.PyDLL(None).poll(ctypes.byref(waiting), 1, int(LIMIT_S * 1e3)) == 1


@contextlib.contextmanager
def server(says=b"", host="127.0.0.1"):
    """The address of a port where connections are taken, and greeted if that is said."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:

        def greet():
            greeted = []
            with contextlib.suppress(OSError):
                while True:
                    greeted.append(listener.accept()[0])
                    greeted[-1].sendall(says)

        if says:
            threading.Thread(target=greet, daemon=True).start()
        name = f"[{host}]" if ":" in host else host
        yield f"{name}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def watched(addresses, silence_s=SILENCE_S):
    silence = Silence(silence_s)
    for task, address in addresses.items():
        silence.watch(task, address)
    try:
        yield silence
    finally:
        silence.stop()


def connected(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), LIMIT_S)


def wait_until(condition):
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("host", HOSTS)
def test_connections_to_a_silent_server_are_closed_while_pythons_lock_is_held(host):
    with (
        server(host="127.0.0.1" if host == "localhost" else host) as there,
        connected(there) as connection,
        watched({3: there.replace("127.0.0.1", host)}) as silence,
    ):
        assert silence.tasks() == []
        assert wait_with_pythons_lock(connection)
        assert connection.recv(1) == b""
        wait_until(lambda: silence.tasks() == [3])


def test_servers_that_answer_keep_their_connections():
    with (
        server() as silent,
        server(b"greeting") as good,
        connected(good) as kept,
        watched({1: good, 2: silent}) as silence,
    ):
        assert kept.recv(100) == b"greeting"
        wait_until(silence.tasks)
        assert silence.tasks() == [2]
        kept.sendall(b"still there")


def test_a_connection_that_is_made_again_is_closed_again():
    with server() as there, watched({1: there}) as silence:
        wait_until(silence.tasks)
        with connected(there) as again:
            assert again.recv(1) == b""


def test_nobody_is_silent_once_the_watch_has_ended():
    with server() as there:
        with watched({1: there}) as silence:
            wait_until(silence.tasks)
        assert silence.tasks() == []


def test_connections_that_were_cut_are_counted():
    with server() as there, server() as elsewhere, connected(elsewhere), connected(there) as connection:
        assert cut(there) == 1
        assert connection.recv(1) == b""
        assert cut("no.such.name.invalid:1") == 0


def watch_and_say(address, silence_s):
    with watched({1: address}, silence_s) as silence:
        print("watches", flush=True)
        sys.stdin.read()
        print("silent:", silence.tasks(), flush=True)


def test_a_process_that_was_stopped_itself_takes_nobody_for_silent():
    """The process is stopped as with Ctrl-Z."""
    with server(b"greeting") as there:
        process = forked.start(watch_and_say, there, 4 * SILENCE_S)
        try:
            assert process.stdout.readline() == "watches\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(6 * SILENCE_S)
            process.send_signal(signal.SIGCONT)
            time.sleep(2 * SILENCE_S)
            assert process.communicate(LIMIT_S)[0] == "silent: []\n"
        finally:
            process.kill()
