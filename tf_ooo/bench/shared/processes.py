"""Processes that a benchmark starts itself: dataclasses, as JSON, tell each what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What begins an answer; a process may print other lines too.
_ANSWER = "ANSWER "
# The file for the result of a process that answers once.
_OUT = "TF_OOO_BENCH_OUT"
_TAIL, _END_S = 3000, 20.0


def command(module: str, *requests: DataclassInstance) -> list[str]:
    """What starts a module that reads its :func:`requests`."""
    return [sys.executable, "-m", module, *(json.dumps(dataclasses.asdict(request)) for request in requests)]


def requests(*kinds: type[DataclassInstance]) -> list[Any]:
    """What this process was told, by its command line: one of each kind."""
    return [kind(**json.loads(text)) for kind, text in zip(kinds, sys.argv[1:], strict=True)]


def quiet() -> dict[str, str]:
    """The environment of processes that compute with one thread and log nothing."""
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def result_of(command: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Runs a process until it ends with :func:`end_with`.

    Raises ClickException, with the end of what the process printed, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        told = {**environment, _OUT: str(out)}
        done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            printed = done.stdout[-_TAIL:] + done.stderr[-_TAIL:]
            raise click.ClickException(f"a process of the benchmark failed:\n{printed}")
        return json.loads(out.read_text())


def end_with(result: object) -> NoReturn:
    """Ends this process with a result, as JSON; at once: a cluster or a server would keep it."""
    Path(os.environ[_OUT]).write_text(json.dumps(result))
    os._exit(0)


def answer(value: object) -> None:
    """Answers a line, as JSON; called by a process that a :class:`LineProcess` has started."""
    print(_ANSWER + json.dumps(value), flush=True)


def serve(turn: Callable[[str], object]) -> None:
    """Answers each line with what ``turn`` makes of it, until no more come."""
    for line in sys.stdin:
        answer(turn(line.strip()))


class LineProcess:
    """A process that is told what to do line by line, and answers each line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self._lines = cast(IO[str], self._process.stdin)
        self._printed = cast(IO[str], self._process.stdout)

    def tell(self, line: str) -> None:
        """Sends a line.  BrokenPipeError where the process has ended."""
        self._lines.write(line + "\n")
        self._lines.flush()

    def answered(self) -> Any:
        """Waits for the next answer.  RuntimeError where the process has ended."""
        for line in self._printed:
            if line.startswith(_ANSWER):
                return json.loads(line.removeprefix(_ANSWER))
        raise RuntimeError(f"the process ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process: no more lines come; one that goes on is killed."""
        with suppress(BrokenPipeError):  # what a process that has ended was told last
            self._lines.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
