"""What a launcher tells the processes that train together: Horovod's variables, or TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator

from tests import forked


def without_launcher() -> dict[str, str | None]:
    """Takes away what another launcher has set."""
    return {name: None for name in os.environ if name.startswith("HOROVOD_") or name == "TF_CONFIG"}


def _serve_rendezvous(workers: int) -> None:
    """Prints the port of a Horovod rendezvous server, which lives until its standard input ends."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    print(f"port {server.start()}", flush=True)
    server.init(get_host_assignments(parse_hosts(f"localhost:{workers}"), workers))
    print("ready", flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def rendezvous(workers: int) -> Iterator[int]:
    """The port of a Horovod rendezvous server on this machine, in a process of its own."""
    process = forked.start(_serve_rendezvous, workers)
    try:
        lines: list[str] = []
        while "ready" not in lines:
            line = process.stdout.readline()
            assert line, "\n".join(lines)
            lines.append(line.strip())
        yield int(next(line.split()[1] for line in lines if line.startswith("port ")))
    finally:
        process.kill()
        process.communicate()


def horovod_variables(rank: int, workers: int, port: int) -> dict[str, str | None]:
    """The variables that Horovod documents for a worker started by hand."""
    values = {
        "RANK": rank,
        "SIZE": workers,
        "LOCAL_RANK": rank,
        "LOCAL_SIZE": workers,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": "lo",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "HOSTNAME": "localhost",
    }
    return without_launcher() | {f"HOROVOD_{name}": str(value) for name, value in values.items()}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one_socket in sockets:
            one_socket.bind(("127.0.0.1", 0))
        return [one_socket.getsockname()[1] for one_socket in sockets]


def collective_variables(workers: int) -> list[dict[str, str | None]]:
    """TF_CONFIG for each of some workers on free ports."""
    config = {"cluster": {"worker": [f"127.0.0.1:{port}" for port in free_ports(workers)]}}
    return [
        without_launcher() | {"TF_CONFIG": json.dumps(config | {"task": {"type": "worker", "index": rank}})}
        for rank in range(workers)
    ]


@contextlib.contextmanager
def environments(engine: str, workers: int) -> Iterator[list[dict[str, str | None]]]:
    """Each rank's variables, for ``"horovod"`` or ``"collectives"``."""
    if engine == "collectives":
        yield collective_variables(workers)
        return
    with rendezvous(workers) as port:
        yield [horovod_variables(rank, workers, port) for rank in range(workers)]
