"""Rows that stay: one file for each run of a case, one row for each of its ways."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Measured

ROWS = Path(__file__).with_name("rows")
SAME, DIFFERS = "stock", "differs"
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "torch")


@dataclass(frozen=True)
class Row:
    """One run of one way.

    Attributes:
        run: is shared by all ways that took turns with each other; turns of one number are a pair.
        order: is the place among them in the first turn; each turn begins one way further.
        had_by: tells who can have the way (:class:`benchmarks.case.Way`); ``baseline``: a user can, and it is
            not ours.
        bits: ``stock``: the weights at the end have stock ``fit``'s bits; ``differs``: they have not, by
            ``largest_difference`` at most; None: they were not compared.
        same_bits_as: other ways of the run that ended with the same bits.
        cores: what each worker had of a core; None: the whole machine.
        predicted_s: seconds of a step by the plan before the run.
    """

    run: str
    suite: str
    case: str
    mode: str
    way: str
    had_by: str
    baseline: bool
    order: int
    turns_s: list[float]
    predicted_s: float | None
    bits: str | None
    largest_difference: float | None
    same_bits_as: list[str]
    machine: str
    cores: float | None
    commit: str
    command: str
    options: dict[str, Any]
    parameters: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)


def rows_of(suite: str, case: Case, measured: Measured, began: datetime.datetime) -> list[Row]:
    """Return one row for each way that ran."""
    shared: dict[str, Any] = {
        "run": f"{began:%Y-%m-%d %H:%M:%S} {case.name}",
        "suite": suite,
        "case": case.name,
        "mode": case.mode,
        "machine": machine(),
        "cores": measured.cores,
        "commit": commit(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "parameters": dict(case.parameters),
    }
    rows = []
    for order, way in enumerate(way for way in case.ways if way.name in measured.ways):
        ran = measured.ways[way.name]
        alike = [
            name
            for name, other in measured.ways.items()
            if name != way.name and ran.bits is not None and other.bits == ran.bits
        ]
        compared = None not in (ran.bits, measured.stock_bits)
        rows.append(
            Row(
                **shared,
                way=way.name,
                had_by=way.had_by,
                baseline=way.is_baseline,
                order=order,
                turns_s=[round(seconds, 7) for seconds in ran.turns_s],
                predicted_s=ran.predicted_s,
                bits=(SAME if ran.bits == measured.stock_bits else DIFFERS) if compared else None,
                largest_difference=ran.largest_difference,
                same_bits_as=alike,
                options=dict(way.options),
                about={**measured.about, **ran.about},
            )
        )
    return rows


def write(rows: list[Row], folder: Path, began: datetime.datetime) -> Path:
    """Keep the rows of one run in a new file, and return it.

    Raises:
        FileExistsError: a run of this case that began in the same second is there; none is overwritten.
    """
    name = re.sub(r"[^a-z0-9]+", "_", rows[0].case.lower()).strip("_")
    path = folder / rows[0].suite / f"{began:%Y-%m-%d_%H%M%S}_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        json.dump([asdict(row) for row in rows], file, indent=1)
        file.write("\n")
    return path


def read(folder: Path = ROWS) -> list[Row]:
    """Return all rows below a folder, oldest runs first."""
    paths = sorted(folder.rglob("*.json"), key=lambda path: path.name)
    return [Row(**row) for path in paths for row in json.loads(path.read_text())]


def machine() -> str:
    """Describe processor, cores, memory and versions in one line; import nothing large."""
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


def commit() -> str:
    """Name the code's commit, with ``+`` if files were changed since; ``unknown`` without a repository."""

    def git(*arguments: str) -> str:
        where = str(Path(__file__).parent)
        done = subprocess.run(["git", "-C", where, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
