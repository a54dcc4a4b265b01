"""Stands in for the launchers of processes that train together: Horovod's variables, or TF_CONFIG."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import forked
from tf_ooo.hosts.devices import free_ports

BIN = Path(sys.executable).parent


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


def collective_variables(workers: int) -> list[dict[str, str | None]]:
    """TF_CONFIG for each of some workers on free ports."""
    config = {"cluster": {"worker": [f"127.0.0.1:{port}" for port in free_ports(workers)]}}
    return [
        without_launcher() | {"TF_CONFIG": json.dumps(config | {"task": {"type": "worker", "index": rank}})}
        for rank in range(workers)
    ]


def script_environment() -> dict[str, str]:
    """For a new Python that no launcher started, which finds this checkout and its environment's programs."""
    kept = {name: value for name, value in os.environ.items() if name not in without_launcher()}
    own = {"PATH": f"{BIN}{os.pathsep}{kept['PATH']}", "PYTHONPATH": forked.NEW_PYTHONS_PATH}
    return kept | {"TF_CPP_MIN_LOG_LEVEL": "3"} | own


def start_horovodrun(workers: int, command: Sequence[object]) -> subprocess.Popen[str]:
    """The real launcher; its output and errors are one pipe."""
    arguments = [str(BIN / "horovodrun"), "--gloo", "-np", str(workers), *map(str, command)]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = {"PYTHONPATH": str(forked.ROOT)}  # the program may import what Keras can do without
    return subprocess.Popen(arguments, env=script_environment() | own, **out)


@contextlib.contextmanager
def by_horovodrun(workers: int) -> Iterator[list[dict[str, str | None]]]:
    """Yield what ``horovodrun`` tells each of the workers that it starts, and its rendezvous server.

    The workers themselves only write their variables down and wait: ours are forked, which takes less time.
    """
    with tempfile.TemporaryDirectory() as folder:
        wait = Path(folder) / "wait"
        wait.touch()
        script = (
            f"env > {folder}/new$HOROVOD_RANK; mv {folder}/new$HOROVOD_RANK {folder}/$HOROVOD_RANK; "
            f"while test -e {wait}; do sleep 0.2; done"
        )
        process = start_horovodrun(workers, ["sh", "-c", script])
        files = [Path(folder) / str(rank) for rank in range(workers)]
        try:
            while not all(file.exists() for file in files):
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.1)
            yield [without_launcher() | _launchers_variables(file.read_text()) for file in files]
        finally:
            wait.unlink()
            said = process.communicate()[0]
    assert process.returncode == 0, said


def _launchers_variables(lines: str) -> dict[str, str | None]:
    """Return the variables that Horovod's launcher has set, of ``NAME=value`` lines."""
    pairs = (line.partition("=") for line in lines.splitlines())
    return {name: value for name, _, value in pairs if name.startswith("HOROVOD_")}


@contextlib.contextmanager
def environments(engine: str, workers: int) -> Iterator[list[dict[str, str | None]]]:
    """Each rank's variables, for ``"horovod"``, ``"horovodrun"``, ``"collectives"``, or ``"both"``."""
    if engine == "horovodrun":
        with by_horovodrun(workers) as variables:
            yield variables
        return
    if engine == "collectives":
        yield collective_variables(workers)
        return
    # Milliseconds between two looks for work, which take a tenth of a core where they are 1, as usual.
    slower = {"HOROVOD_CYCLE_TIME": "15"}
    clusters = collective_variables(workers) if engine == "both" else [without_launcher()] * workers
    with rendezvous(workers) as port:
        yield [
            horovod_variables(rank, workers, port) | slower | {"TF_CONFIG": clusters[rank].get("TF_CONFIG")}
            for rank in range(workers)
        ]


@contextlib.contextmanager
def training_together(
    engine: str,
    workers: int,
    function: Callable[..., Any],
    *arguments: Any,
    more: Mapping[str, str | None] | None = None,
) -> Iterator[list[forked.Forked]]:
    """Processes that train together, each with ``more`` variables; none is left."""
    with environments(engine, workers) as variables:
        processes = [
            forked.start(function, *arguments, environment={**own, **(more or {})}) for own in variables
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
