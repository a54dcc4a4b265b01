"""Processes that a benchmark starts itself: dataclasses, as JSON, tell each what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TAIL = 3000
Kind = TypeVar("Kind")


class JsonOf(click.ParamType, Generic[Kind]):  # type: ignore[type-arg]
    """The argument of such a process: a dataclass of plain values, written as JSON."""

    name = "request"

    def __init__(self, kind: type[Kind]) -> None:
        self._kind = kind

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Kind:
        """From JSON."""
        return self._kind(**json.loads(value))


def command(module: str, *requests: DataclassInstance) -> list[str]:
    """What starts a module whose click command has arguments of type :class:`JsonOf`."""
    return [sys.executable, "-m", module, *(json.dumps(dataclasses.asdict(request)) for request in requests)]


def quiet() -> dict[str, str]:
    """The environment of processes that compute with one thread and log nothing."""
    return os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def result_of(command: list[str], out: Path, environment: dict[str, str]) -> Any:
    """Runs a process until it ends, and reads what it has written to ``out`` as JSON.

    Raises ClickException, with the end of what the process printed, where it fails.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        printed = done.stdout[-_TAIL:] + done.stderr[-_TAIL:]
        raise click.ClickException(f"a process of the benchmark failed:\n{printed}")
    return json.loads(out.read_text())
