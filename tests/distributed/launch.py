"""Starts workers as their users do: by hand from environment variables, by horovodrun, with TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    """This process' environment without a trace of a launcher."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_") and k != "TF_CONFIG"}
    path = f"{BIN}{os.pathsep}{kept['PATH']}"
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    return kept | quiet | {"PATH": path} | more


@contextlib.contextmanager
def rendezvous(workers: int) -> Iterator[int]:
    """The port of a Horovod rendezvous server on this machine."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{workers}"), workers))
    try:
        yield port
    finally:
        server.stop()


def horovod_environment(rank: int, workers: int, port: int) -> dict[str, str]:
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
    return environment(**{f"HOROVOD_{name}": str(value) for name, value in values.items()})


def collective_environments(workers: int) -> list[dict[str, str]]:
    """TF_CONFIG for each of some workers on free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    config = {"cluster": {"worker": hosts}}
    return [
        environment(TF_CONFIG=json.dumps(config | {"task": {"type": "worker", "index": rank}}))
        for rank in range(workers)
    ]


def start(environments: Sequence[dict[str, str]], command: Sequence[object]) -> list[subprocess.Popen[str]]:
    """One process of the same Python per environment."""
    arguments = [sys.executable, *map(str, command)]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen(arguments, env=env, **out) for env in environments]


def finish(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """What each has printed, when all have ended; ends them if they do not in time."""
    try:
        return [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def run_horovod(workers: int, command: Sequence[object], timeout_s: float = 400) -> list[str]:
    """Workers started by hand; their output, by rank."""
    with rendezvous(workers) as port:
        environments = [horovod_environment(rank, workers, port) for rank in range(workers)]
        return finish(start(environments, command), timeout_s)


def run_collectives(workers: int, command: Sequence[object], timeout_s: float = 400) -> list[str]:
    """Workers with TF_CONFIG; their output, by rank."""
    return finish(start(collective_environments(workers), command), timeout_s)


def horovodrun(workers: int, command: Sequence[object], timeout_s: float = 400) -> tuple[int, str]:
    """Exit status and output of ``horovodrun --gloo``."""
    arguments = ["horovodrun", "--gloo", "-np", str(workers), sys.executable, *map(str, command)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr
