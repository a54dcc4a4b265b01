"""Bytes that no worker expects, on the ports of workers and of the training that uses them."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
from pathlib import Path
from typing import Any

from tests import forked, launches
from tests.harness.drawing import Draw
from tests.malformed.case import Case, Lost
from tests.malformed.fits import data, differences, perceptron, state_of, train

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HEADERS = PREFACE + SETTINGS + b"\0\0\1\1\0\0\0\0\1\x82"
EPOCHS = 6
TASKS = 2


def drawn_ports(draw: Draw) -> Case:
    """Something is sent to one of the ports, before a training or while it runs."""
    cut = draw.below(30)
    sent: dict[str, bytes] = {
        "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.bytes(500),
        f"{cut} bytes of gRPC's preface": (PREFACE + SETTINGS)[:cut],
        "half a gRPC frame": PREFACE + SETTINGS + b"\0\1\0\0\0\0\0\0\1" + b"\x82",
        "a frame of 16 MB that does not come": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1",
        "frames of no known kind": PREFACE + SETTINGS + b"\0\0\4\xfa\0\0\0\0\1abcd" * 1000,
        "headers that never end": HEADERS + b"\0\0\1\x09\0\0\0\0\1\x82" * 5000,
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
        cluster, model = joined(), perceptron()
        sender = _Sender(cluster.split(",")[task], sent[what], times, end, again=during)
        sender.start()
        if not during:
            sender.join()
        try:
            _train(model, cluster)
        finally:
            sender.close()
        if not sender.opened:
            raise Lost("nothing could be sent")
        changed = differences(_undisturbed(cluster), state_of(model))
        if changed:
            raise Lost(f"{changed[0]} has other bits than in a training that nobody disturbed")

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


def _train(model: Any, cluster: str) -> None:
    import tf_ooo
    from tf_ooo.costs import LayerCosts, Link
    from tf_ooo.costs.table import CostTable

    costs = CostTable([LayerCosts(1.0, 1.0, 1.0) for _ in range(4)], Link(1e-3, 1e9))
    callback = tf_ooo.OOOBackprop(
        mode="pipeline", devices=cluster, microbatches=2, schedule="zb_h1", costs=costs
    )
    train(model, *data(), callback, epochs=EPOCHS)


@functools.cache
def _undisturbed(cluster: str) -> dict[str, Any]:
    """Return what the same training ends with where nobody sends anything."""
    model = perceptron()
    _train(model, cluster)
    return state_of(model)


class _Sender(threading.Thread):
    """Sends the same some times, or so often again and again until it is closed."""

    def __init__(self, address: str, said: bytes, times: int, end: str, again: bool) -> None:
        super().__init__(daemon=True)
        self._host, _, self._port = address.rpartition(":")
        self._said, self._times, self._end, self._again = said, times, end, again
        self._closed, self._connections = threading.Event(), list[socket.socket]()
        self.opened = 0

    def run(self) -> None:
        while not self._closed.wait(0.05):
            for _ in range(self._times):
                with contextlib.suppress(OSError):
                    self._send()
            if not self._again:
                return

    def close(self) -> None:
        self._closed.set()
        self.join(30)
        for connection in self._connections:
            connection.close()

    def _send(self) -> None:
        connection = socket.create_connection((self._host, int(self._port)), timeout=5.0)
        self.opened += 1
        self._connections.append(connection)
        connection.sendall(self._said)
        if self._end == "reads the answer":
            connection.settimeout(0.2)
            connection.recv(10_000)
        elif self._end == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._end != "hangs":
            connection.close()
