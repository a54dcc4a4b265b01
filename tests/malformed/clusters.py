"""Clusters that there are not: addresses of nobody, of somebody else, or that are none."""

from __future__ import annotations

import contextlib
import os
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.drawing import Draw
from tests.malformed.case import Case, Named
from tests.malformed.fits import data, perceptron, refused_or_trains

# A worker may still be starting: the usual minute is for machines.
WAIT_S = 1.5


def drawn_clusters(draw: Draw) -> Case:
    """``devices=``, ``TF_OOO_CLUSTER``, ``TF_CONFIG``, and servers that are no workers."""
    return draw.choice((_devices, _devices, _variable, _config, _config, _somebody, _somebody))(draw)


TEXTS = (
    "", " ", "localhost", "localhost:", ":2222", "localhost:0", "localhost:0,localhost:1", "a:99999,b:2",
    "a:1,a:1", "a b:1,c:2", "a:1;b:2", "http://localhost:2222", "grpc://localhost:2222", "[::1:2222",
    "::1:2222", "a:-1", "a:x", "a:1,", ",", "a:222222", "CPU:0", "CPU:0,CPU:1", "GPU:0, GPU:1", "cpu", "gpu",
    "/job:worker/task:0", "all", "2", "{'worker': ['a:1']}", "a:1\nb:2", "ü:1", "a:1,b:2,a:1", "auto",
    "host1:2222 host2:2222", "CPU:0;CPU:1", "XPU:0",
)  # fmt: skip
NAMES = (
    "CPU:0", "CPU:1", "GPU:0", "cpu:0", "CPU", "CPU:-1", "CPU:x", "/device:CPU:7", "", "a:1", "XPU:0", 3,
    None,
)  # fmt: skip


def _two(task: str, workers: str = '["a:1", "b:2"]') -> str:
    """TF_CONFIG of two workers and a task."""
    return f'{{"cluster": {{"worker": {workers}}}, "task": {task}}}'


FIRST = '{"type": "worker", "index": 0}'
CONFIGS = (
    '{"cluster"', "[]", "3", "null", '"worker"', "\x01", "{}", "worker=a:1", '{"cluster": []}',
    '{"cluster": 3}', '{"cluster": {"worker": 3}}', '{"cluster": {"worker": "a:1,b:2"}}',
    '{"cluster": {"worker": ["a:1", "b:2"]}}',
    *map(_two, ("3", '{"type": "worker"}', '{"type": "worker", "index": 7}', "null", '{"index": 0}')),
    _two('{"type": "worker", "index": "x"}'), _two('{"type": "boss", "index": 0}'),
    _two(FIRST, '["a:1", "a:1"]'), _two(FIRST, '["a", "b:2"]'), _two(FIRST, '["a:99999", "b:2"]'),
    _two(FIRST, "[1, 2]"), _two(FIRST, '{"0": "a:1", "1": "b:2"}'), _two('{"type": ["worker"], "index": 0}'),
)  # fmt: skip


def _case(named: Named, variables: dict[str, str], **options: Any) -> Case:
    """A fit with these variables and a callback of these options."""

    def attempt(folder: Path) -> None:
        import tf_ooo

        with mock.patch.dict(os.environ, variables):
            refused_or_trains(perceptron, data(), tf_ooo.OOOBackprop(**options))

    return Case("clusters", f"OOOBackprop(**{options}) with {variables}", named, attempt)


def _devices(draw: Draw) -> Case:
    mode = draw.choice(("pipeline", "layerpipe"))
    value = draw.choice(TEXTS) if draw.chance(0.6) else [draw.choice(NAMES) for _ in range(1 + draw.below(3))]
    if isinstance(value, str):
        shown = [value.strip() or "''", *(part.strip() for part in value.split(",") if part.strip())]
    else:
        shown = [*(str(name) for name in value if name), "''"]
    return _case([["devices"], [*shown, "devices="]], {}, mode=mode, devices=value, profile_steps=1)


def _variable(draw: Draw) -> Case:
    return _case([["TF_OOO_CLUSTER"]], {"TF_OOO_CLUSTER": draw.choice(TEXTS[1:])}, mode="pipeline")


def _config(draw: Draw) -> Case:
    mode = draw.choice(("data_parallel", "data_parallel", "pipeline", "layerpipe"))
    options = {"engine": "collectives"} if mode == "data_parallel" and draw.chance(0.6) else {}
    named = [["TF_CONFIG", "launcher", "several were launched", "devices"]]
    return _case(named, {"TF_CONFIG": draw.choice(CONFIGS)}, mode=mode, **options)


def _somebody(draw: Draw) -> Case:
    """The second address is of nobody, or of somebody who is no worker."""
    says: dict[str, bytes | None] = {
        "an HTTP server": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "one who hangs up": None,
        "one who says nothing": b"",
        "one who says random bytes": draw.bytes(5000),
        "one who answers with zeros": bytes(100_000),
        "an SSH server": b"SSH-2.0-OpenSSH_9.6\r\n",
        "an empty HTTP/2 frame": b"\0\0\0\4\0\0\0\0\0" * 3,
    }
    who = draw.choice(("nobody", *says, "a server of gRPC that is no TensorFlow", "a name that is none"))

    def attempt(folder: Path) -> None:
        from tf_ooo.hosts.cluster import connect
        from tf_ooo.hosts.devices import free_port

        with contextlib.ExitStack() as stack:
            other = "no.such.host.invalid:2222"
            if who == "nobody":
                other = f"127.0.0.1:{free_port()}"
            elif who in says:
                other = stack.enter_context(_server(says[who]))
            elif "gRPC" in who:
                other = stack.enter_context(_grpc_server())
            connect(f"127.0.0.1:{free_port()},{other}", wait_s=WAIT_S)

    named = [["(task 1)"], ["is not there"], ["tf-ooo worker --cluster"]]
    return Case("clusters", f"a cluster whose task 1 is {who}", named, attempt)


@contextlib.contextmanager
def _server(said: bytes | None) -> Iterator[str]:
    """Says this to whoever connects, or hangs up; its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(30)
            with contextlib.suppress(OSError):
                while said is not None and self.request.recv(10_000):
                    self.request.sendall(said)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextlib.contextmanager
def _grpc_server() -> Iterator[str]:
    """One of TensorFlow's own that knows no workers: a dispatcher of its data service."""
    import tensorflow as tf

    dispatcher = tf.data.experimental.service.DispatchServer(
        tf.data.experimental.service.DispatcherConfig(port=0, protocol="grpc")
    )
    try:
        yield f"127.0.0.1:{dispatcher.target.rpartition(':')[2]}"
    finally:
        dispatcher._stop()
