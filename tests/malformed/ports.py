"""Bytes that no worker expects, on the ports of workers and of the training that uses them."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests import forked, launches
from tests.malformed.case import Case, Draw, Lost
from tests.malformed.fits import data, differences, perceptron, state_of, train

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
EPOCHS = 6
TASKS = 2


def drawn_ports(draw: Draw) -> Case:
    """Something is sent to one of the ports, before a training or while it runs."""
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.bytes(500)
    cut = draw.below(30)
    sent: dict[str, bytes] = {
        "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "a TLS hello": tls,
        f"{cut} bytes of gRPC's preface": (PREFACE + SETTINGS)[:cut],
        "half a gRPC frame": PREFACE + SETTINGS + b"\0\1\0\0\0\0\0\0\1" + b"\x82",
        "a frame of 16 MB that does not come": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1",
        "frames of no known kind": PREFACE + SETTINGS + b"\0\0\4\xfa\0\0\0\0\1abcd" * 1000,
        "headers that never end": PREFACE
        + SETTINGS
        + b"\0\0\1\1\0\0\0\0\1\x82"
        + b"\0\0\1\x09\0\0\0\0\1\x82" * 5000,
        "random bytes": draw.bytes(20_000),
        "random bytes behind the preface": PREFACE + SETTINGS + draw.bytes(20_000),
        "10 MB of zeros": bytes(10_000_000),
        "nothing": b"",
        "a byte": b"P",
        "an SSH greeting": b"SSH-2.0-OpenSSH_9.6\r\n",
        "a method that there is not": _call(b"/tensorflow.WorkerService/NoSuchMethod"),
        "a step that is none": _call(b"/tensorflow.WorkerService/RunGraph"),
        "an eager call that is none": _call(b"/tensorflow.eager.EagerService/Enqueue"),
        "a session that is none": _call(b"/tensorflow.MasterService/RunStep"),
    }
    what = draw.choice(list(sent))
    task, during, times = draw.below(TASKS), draw.chance(0.8), draw.choice((1, 1, 5, 40))
    times = min(times, 3) if len(sent[what]) > 10**6 else times
    end = draw.choice(("reads the answer", "hangs", "resets", "closes"))
    when = "during a training" if during else "before a training"
    text = f"{what}, {times} times to task {task}, then {end}, {when}"

    def attempt(folder: Path) -> None:
        cluster = joined()
        sending = functools.partial(_send, cluster.split(",")[task], sent[what], times, end)
        held = _send_before(sending) if not during else []
        try:
            _train_and_compare(cluster, sending if during else None)
        finally:
            for connection in held:
                connection.close()

    return Case("ports", text, [], attempt)


def _call(method: bytes) -> bytes:
    """A whole gRPC request, whose message is no message."""

    def field(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    headers = b"".join(
        field(*pair)
        for pair in (
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"), (b"te", b"trailers"),
        )
    )  # fmt: skip
    message = b"\0\0\0\0\x08\xff\xff\xff\xff\xff\xff\xff\xff"
    return (
        PREFACE
        + SETTINGS
        + (len(headers).to_bytes(3, "big") + b"\1\4\0\0\0\1" + headers)
        + (len(message).to_bytes(3, "big") + b"\0\1\0\0\0\1" + message)
    )


@functools.cache
def joined() -> str:
    """The cluster of this process, which is its task 0; a worker is task 1.  Started once."""
    from tests.distributed.clusters import start_worker, wait_until_ready
    from tf_ooo.hosts.cluster import connect

    cluster = ",".join(f"127.0.0.1:{port}" for port in launches.free_ports(TASKS))
    worker = start_worker(cluster, 1)
    wait_until_ready(worker)
    threading.Thread(target=worker.stdout.read, daemon=True).start()
    _keep.append(worker)
    connect(cluster)
    return cluster


_keep: list[forked.Forked] = []


def _train_and_compare(cluster: str, sending: Callable[[], list[socket.socket]] | None) -> None:
    model, already = perceptron(), len(_opened)
    stop, thread = threading.Event(), None
    if sending is not None:
        thread = threading.Thread(target=_keep_sending, args=(sending, stop), daemon=True)
        thread.start()
    try:
        _train(model, cluster)
    finally:
        stop.set()
        if thread is not None:
            thread.join(30)
    if sending is not None and len(_opened) == already:
        raise Lost("nothing could be sent while it trained")
    changed = differences(_undisturbed(cluster), state_of(model))
    if changed:
        raise Lost(f"{changed[0]} has other bits than in a training that nobody disturbed")


def _train(model: Any, cluster: str) -> None:
    import tf_ooo
    from tf_ooo.costs import LayerCosts, Link
    from tf_ooo.costs.table import CostTable

    costs = CostTable([LayerCosts(1.0, 1.0, 1.0) for _ in range(4)], Link(1e-3, 1e9))
    callback = tf_ooo.OOOBackprop(
        mode="pipeline", devices=cluster, microbatches=2, schedule="zb_h1", costs=costs
    )
    train(model, *data(), callback, epochs=EPOCHS)


# The address of each connection that was opened to send something.
_opened: list[str] = []
_reference: dict[str, dict[str, Any]] = {}


def _undisturbed(cluster: str) -> dict[str, Any]:
    """Return what the same training ends with where nobody sends anything."""
    if cluster not in _reference:
        model = perceptron()
        _train(model, cluster)
        _reference[cluster] = state_of(model)
    return _reference[cluster]


def _send_before(sending: Callable[[], list[socket.socket]]) -> list[socket.socket]:
    connections = sending()
    time.sleep(0.3)
    return connections


def _keep_sending(sending: Callable[[], list[socket.socket]], stop: threading.Event) -> None:
    """Until the training has ended."""
    connections: list[socket.socket] = []
    while not stop.wait(0.05):
        connections += sending()
    for connection in connections:
        connection.close()


def _send(address: str, said: bytes, times: int, end: str) -> list[socket.socket]:
    """Connections that are still open."""
    host, _, port = address.rpartition(":")
    opened: list[socket.socket] = []
    for _ in range(times):
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, int(port)), timeout=5.0)
            opened.append(connection)
            _opened.append(address)
            connection.sendall(said)
            _end(connection, end)
    return [connection for connection in opened if connection.fileno() >= 0][:200]


def _end(connection: socket.socket, how: str) -> None:
    if how == "reads the answer":
        connection.settimeout(0.2)
        connection.recv(10_000)
    elif how == "resets":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, np.array([1, 0], "i4").tobytes())
    if how != "hangs":
        connection.close()
