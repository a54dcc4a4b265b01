"""Runs that stay: what was measured, when, on what machine, with which code and by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

_META = "tf_ooo.bench.kept"
# Under which name a group of commands keeps its rows, in the context's meta; without it the command's own.
NAME = "tf_ooo.bench.name"
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "torch")


@dataclass(frozen=True)
class Run:
    """A file of ``docs/benchmarks/rows``.

    Attributes:
        bench: the command's name, ``data-parallel``.
        date: when it began, UTC.
        commit: of the code, with ``+`` if files were changed since; a version where there is no repository.
        command: as it can be run again; empty: an older run, whose command was not kept.
    """

    bench: str
    date: str
    commit: str
    command: str
    machine: str
    rows: list[dict[str, Any]]


def keep_in(ctx: click.Context, _: click.Parameter, folder: Path | None) -> None:
    """A click callback: rows that the command writes are kept in a new file of the folder."""
    if folder is None:
        return
    now = datetime.datetime.now(datetime.UTC)
    bench = str(ctx.meta.get(NAME, ctx.info_name))
    path = folder / bench / f"{now:%Y-%m-%d_%H%M%S}.json"
    if path.exists():
        raise click.ClickException(f"{path} is there already, and no run is overwritten: start it again")
    command = shlex.join(["tf-ooo", *sys.argv[1:]])
    about = Run(bench, f"{now:%Y-%m-%d %H:%M}", _commit(), command, machine(), [])
    ctx.meta[_META] = path, about


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows so far into the file of the running command, where one was asked for."""
    ctx = click.get_current_context(silent=True)
    if ctx is None or _META not in ctx.meta or not rows:
        return
    path, about = ctx.meta[_META]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**asdict(about), "rows": list(rows)}, indent=1) + "\n")


def machine() -> str:
    """Processor, cores, memory and versions, in one line; imports nothing large."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{_processor()}, {os.cpu_count()} cores, {memory_gb:.0f} GB; {', '.join(versions)}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    where = Path(__file__).parent
    try:
        commit = _git(where, "rev-parse", "--short=10", "HEAD")
        return commit + ("+" if _git(where, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return importlib.metadata.version("tf_ooo")


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
