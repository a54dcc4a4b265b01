"""Clusters that there are not: addresses of nobody, of somebody else, or that are none."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.malformed.case import Case, Draw
from tests.malformed.fits import data, perceptron, refused_or_trains

Answer = Callable[[socket.socket], None]
# A worker may still be starting: the usual minute is for machines.
WAIT_S = 1.5


def drawn_clusters(draw: Draw) -> Case:
    """``devices=``, ``TF_OOO_CLUSTER``, ``TF_CONFIG``, and servers that are no workers."""
    return draw.choice((_devices, _devices, _variable, _config, _config, _somebody, _somebody))(draw)


TEXTS = (
    *("", " ", "localhost", "localhost:", ":2222", "localhost:0", "localhost:0,localhost:1", "a:99999,b:2"),
    *("a:1,a:1", "a b:1,c:2", "a:1;b:2", "http://localhost:2222", "grpc://localhost:2222", "[::1:2222"),
    *(
        "::1:2222",
        "a:-1",
        "a:x",
        "a:1,",
        ",",
        "a:222222",
        "CPU:0",
        "CPU:0,CPU:1",
        "GPU:0, GPU:1",
        "cpu",
        "gpu",
    ),
    *("/job:worker/task:0", "all", "2", "{'worker': ['a:1']}", "a:1\nb:2", "ü:1", "a:1,b:2,a:1", "auto"),
    *("host1:2222 host2:2222", "CPU:0;CPU:1", "XPU:0"),
)


def _two(task: str, workers: str = '["a:1", "b:2"]') -> str:
    """TF_CONFIG of two workers and a task."""
    return f'{{"cluster": {{"worker": {workers}}}, "task": {task}}}'


FIRST = '{"type": "worker", "index": 0}'
CONFIGS = (
    *(
        '{"cluster"',
        "[]",
        "3",
        "null",
        '"worker"',
        "\x01",
        "{}",
        "worker=a:1",
        '{"cluster": []}',
        '{"cluster": 3}',
    ),
    *(
        '{"cluster": {"worker": 3}}',
        '{"cluster": {"worker": "a:1,b:2"}}',
        '{"cluster": {"worker": ["a:1", "b:2"]}}',
    ),
    *(_two("3"), _two('{"type": "worker"}'), _two('{"type": "worker", "index": 7}'), _two("null")),
    *(_two('{"type": "worker", "index": "x"}'), _two('{"type": "boss", "index": 0}'), _two('{"index": 0}')),
    *(_two(FIRST, '["a:1", "a:1"]'), _two(FIRST, '["a", "b:2"]'), _two(FIRST, '["a:99999", "b:2"]')),
    *(
        _two(FIRST, "[1, 2]"),
        _two(FIRST, '{"0": "a:1", "1": "b:2"}'),
        _two('{"type": ["worker"], "index": 0}'),
    ),
)


def _fit(make: Callable[[], Any], **variables: str) -> Callable[[Path], None]:
    def attempt(folder: Path) -> None:
        with environment(**variables):
            refused_or_trains(perceptron, data(), make())

    return attempt


def _devices(draw: Draw) -> Case:
    import tf_ooo

    mode = draw.choice(("pipeline", "layerpipe"))
    names = (
        "CPU:0",
        "CPU:1",
        "GPU:0",
        "cpu:0",
        "CPU",
        "CPU:-1",
        "CPU:x",
        "/device:CPU:7",
        "",
        "a:1",
        "XPU:0",
        3,
        None,
    )
    value = draw.choice(TEXTS) if draw.chance(0.6) else [draw.choice(names) for _ in range(1 + draw.below(3))]
    shown = (
        [str(value).strip() or "''"]
        if isinstance(value, str)
        else [str(name) for name in value if name] + ["''"]
    )
    parts = [part.strip() for part in shown[0].split(",") if part.strip()]
    return Case(
        "clusters",
        f"OOOBackprop(mode={mode!r}, devices={value!r})",
        [["devices"], [*shown, *parts, "devices="]],
        _fit(lambda: tf_ooo.OOOBackprop(mode=mode, devices=value, profile_steps=1)),
    )


def _variable(draw: Draw) -> Case:
    import tf_ooo

    value = draw.choice([text for text in TEXTS if text])
    return Case(
        "clusters",
        f"TF_OOO_CLUSTER={value!r}",
        [["TF_OOO_CLUSTER"]],
        _fit(lambda: tf_ooo.OOOBackprop(mode="pipeline"), TF_OOO_CLUSTER=value),
    )


def _config(draw: Draw) -> Case:
    import tf_ooo

    value = draw.choice(CONFIGS)
    mode = draw.choice(("data_parallel", "data_parallel", "pipeline", "layerpipe"))
    options = {"engine": "collectives"} if mode == "data_parallel" and draw.chance(0.6) else {}
    return Case(
        "clusters",
        f"TF_CONFIG={value!r}, OOOBackprop(mode={mode!r}, {options})",
        [["TF_CONFIG", "launcher", "several were launched", "devices"]],
        _fit(lambda: tf_ooo.OOOBackprop(mode=mode, **options), TF_CONFIG=value),
    )


def _somebody(draw: Draw) -> Case:
    """The second address is of nobody, or of somebody who is no worker."""
    answers: dict[str, Answer | None] = {
        "nobody": None,
        "an HTTP server": lambda peer: _say(peer, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        "one who hangs up": lambda peer: None,
        "one who says nothing": lambda peer: peer.settimeout(30) or _until_closed(peer),
        "one who says random bytes": lambda peer: _say(peer, draw.bytes(5000)),
        "one who answers with zeros": lambda peer: _say(peer, bytes(100_000)),
        "an SSH server": lambda peer: _say(peer, b"SSH-2.0-OpenSSH_9.6\r\n"),
        "an empty HTTP/2 frame": lambda peer: _say(peer, b"\0\0\0\4\0\0\0\0\0" * 3),
        "a server of gRPC that is no TensorFlow": None,
        "a name that is none": None,
    }
    who = draw.choice(list(answers))

    def attempt(folder: Path) -> None:
        from tf_ooo.hosts.addresses import free_port
        from tf_ooo.hosts.cluster import connect

        own = f"127.0.0.1:{free_port()}"
        if who == "a name that is none":
            connect(f"{own},no.such.host.invalid:2222", wait_s=WAIT_S)
        elif who == "nobody":
            connect(f"{own},127.0.0.1:{free_port()}", wait_s=WAIT_S)
        elif answers[who] is None:
            with _grpc_server() as port:
                connect(f"{own},127.0.0.1:{port}", wait_s=WAIT_S)
        else:
            with _server(answers[who]) as port:
                connect(f"{own},127.0.0.1:{port}", wait_s=WAIT_S)

    return Case(
        "clusters",
        f"a cluster whose task 1 is {who}",
        [["(task 1)"], ["is not there"], ["tf-ooo worker --cluster"]],
        attempt,
    )


def _say(peer: socket.socket, said: bytes) -> None:
    peer.recv(10_000)
    peer.sendall(said)
    _until_closed(peer)


def _until_closed(peer: socket.socket) -> None:
    while peer.recv(10_000):
        pass


@contextlib.contextmanager
def _server(answer: Answer) -> Iterator[int]:
    """Answers so whoever connects; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_one(peer: socket.socket) -> None:
            with peer, contextlib.suppress(OSError):
                answer(peer)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve_one, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _grpc_server() -> Iterator[int]:
    """One of TensorFlow's own that knows no workers: a dispatcher of its data service."""
    import tensorflow as tf

    dispatcher = tf.data.experimental.service.DispatchServer(
        tf.data.experimental.service.DispatcherConfig(port=0, protocol="grpc")
    )
    try:
        yield int(dispatcher.target.rpartition(":")[2])
    finally:
        dispatcher._stop()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """These variables in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
