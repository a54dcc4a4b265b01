"""Real graphs, placement, order and messages; the tasks wait: logical devices of one process, or workers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.case import Case, Measured
from benchmarks.emulated import waiting
from benchmarks.processes import command, measured_from, quiet, result_of
from tf_ooo.hosts.addresses import free_ports

_MOST_S = 1800


def why_not(case: Case) -> str:
    """The op has to be compiled."""
    return waiting.why_not()


def run(case: Case) -> Measured:
    """Start the workers, if there are to be some, and the process that trains."""
    waiting.library()
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        environment = quiet() | {waiting.LOG: str(Path(folder) / "log")}
        parameters = dict(case.parameters)
        processes = parameters.pop("processes")
        with _workers(parameters["devices"] if processes else 0, environment) as cluster:
            told = replace(case, parameters=parameters | {"cluster": cluster})
            start = command("benchmarks.emulated.driver", told)
            return measured_from(result_of(start, environment, timeout_s=_MOST_S))


@contextlib.contextmanager
def _workers(count: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Their addresses; they end with the context."""
    cluster = ",".join(f"127.0.0.1:{port}" for port in free_ports(count))
    start = [sys.executable, "-m", "benchmarks.emulated.worker", cluster]
    with contextlib.ExitStack() as stack:
        for task in range(count):
            worker = subprocess.Popen([*start, str(task)], env=environment, stdout=subprocess.DEVNULL)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
        yield cluster
