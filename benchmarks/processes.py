"""Processes of a benchmark: each is given dataclasses as JSON, and leaves its result in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from benchmarks.case import Case, Measured, Way, WayRun

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_OUT = "BENCHMARKS_OUT"
_TAIL = 3000


class BenchmarkError(Exception):
    """A process of a benchmark failed; the text is the end of what it printed."""


def command(module: str, *requests: DataclassInstance) -> list[str]:
    """Return what starts a module that reads its :func:`requests`."""
    return [sys.executable, "-m", module, *(json.dumps(dataclasses.asdict(request)) for request in requests)]


def requests(*kinds: type[DataclassInstance]) -> list[Any]:
    """Return what this process was given on its command line, one of each kind."""
    given = [json.loads(text) for text in sys.argv[1:]]
    return [
        case_from(told) if kind is Case else kind(**told) for kind, told in zip(kinds, given, strict=True)
    ]


def case_from(told: dict[str, Any]) -> Case:
    """Return the case that was written as JSON."""
    return Case(**{**told, "ways": tuple(Way(**way) for way in told["ways"])})


def quiet(threads: int | None = 1) -> dict[str, str]:
    """Return the environment of processes that log nothing and compute with so many threads; None: all."""
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | limit


def result_of(start: Sequence[str], environment: Mapping[str, str], timeout_s: float | None = None) -> Any:
    """Run a process until it ends with :func:`end_with`, and return its result.

    Raises:
        BenchmarkError: the process failed, or took longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        told = {**environment, _OUT: str(out)}
        try:
            done = subprocess.run(
                start, env=told, capture_output=True, text=True, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"a process of the benchmark took more than {timeout_s:g} s") from error
        if done.returncode or not out.exists():
            raise BenchmarkError(f"a process failed:\n{done.stdout[-_TAIL:]}{done.stderr[-_TAIL:]}")
        return json.loads(out.read_text())


def end_with(result: DataclassInstance) -> NoReturn:
    """End this process with a result at once: a cluster or a server would keep it."""
    Path(os.environ[_OUT]).write_text(json.dumps(dataclasses.asdict(result)))
    os._exit(0)


def measured_from(told: dict[str, Any]) -> Measured:
    """Return what a process measured, from its JSON."""
    return Measured(**{**told, "ways": {name: WayRun(**run) for name, run in told["ways"].items()}})


def end_cleanly() -> None:
    """Leave no workers and no CPU groups behind when somebody ends the benchmark early."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(ending, lambda number, frame: sys.exit(128 + number))
