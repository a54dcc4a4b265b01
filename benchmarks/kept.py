"""Rows that stay: one file for each run of a case, one row for each of its ways."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import statistics
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
    """One run of one way."""

    run: str  # is shared by all ways that took turns with each other; turns of one number are a pair
    suite: str
    case: str
    mode: str
    way: str
    had_by: str  # who can have the way (benchmarks.case)
    baseline: bool  # a user can have it, and it is not ours
    order: int  # the place among the ways in the first turn; each turn begins one way further
    turns_s: list[float]
    predicted_s: float | None  # seconds of a step by the plan before the run
    bits: str | None  # SAME as stock fit's weights at the end, or DIFFERS; None: they were not compared
    largest_difference: float | None
    same_bits_as: list[str]  # other ways of the run that ended with the same bits
    machine: str
    cores: float | None  # what each worker had of a core; None: the whole machine
    commit: str
    command: str
    options: dict[str, Any]
    parameters: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Seconds of a step in the median turn."""
        return statistics.median(self.turns_s)


def rows_of(suite: str, case: Case, measured: Measured, began: datetime.datetime) -> list[Row]:
    """Return one row for each way that ran."""
    stock, here, code = measured.stock_bits, machine(), commit()
    ways = [(way, measured.ways[way.name]) for way in case.ways if way.name in measured.ways]
    return [
        Row(
            run=f"{began:%Y-%m-%d %H:%M:%S} {case.name}",
            suite=suite,
            case=case.name,
            mode=case.mode,
            way=way.name,
            had_by=way.had_by,
            baseline=way.is_baseline,
            order=order,
            turns_s=[round(seconds, 7) for seconds in ran.turns_s],
            predicted_s=ran.predicted_s,
            bits=None if None in (ran.bits, stock) else SAME if ran.bits == stock else DIFFERS,
            largest_difference=ran.largest_difference,
            same_bits_as=[
                of.name for of, other in ways if of is not way and other.bits == ran.bits is not None
            ],
            machine=here,
            cores=measured.cores,
            commit=code,
            command=shlex.join(["python", *sys.orig_argv[1:]]),
            options=dict(way.options),
            parameters=dict(case.parameters),
            about={**measured.about, **ran.about},
        )
        for order, (way, ran) in enumerate(ways)
    ]


def write(rows: list[Row], folder: Path, began: datetime.datetime) -> Path:
    """Keep the rows of one run in a new file, and return it; FileExistsError: none is overwritten."""
    name = re.sub(r"[^a-z0-9]+", "_", rows[0].case.lower()).strip("_")
    path = folder / rows[0].suite / f"{began:%Y-%m-%d_%H%M%S}_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        file.write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return path


def read(folder: Path = ROWS) -> list[Row]:
    """Return all rows below a folder, oldest runs first."""
    paths = sorted(folder.rglob("*.json"), key=lambda path: path.name)
    return [Row(**row) for path in paths for row in json.loads(path.read_text())]


def machine() -> str:
    """Describe processor, cores, memory and versions in one line; import nothing large."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    installed = ((of.name, of.version) for of in importlib.metadata.distributions() if of.name in _PACKAGES)
    versions = [f"Python {platform.python_version()}", *map(" ".join, installed)]
    cpuinfo = Path("/proc/cpuinfo")
    model_line = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    processor = model_line[1] if model_line else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, {memory_gb:.0f} GB; {', '.join(versions)}"


def commit() -> str:
    """Name the code's commit, with ``+`` if files were changed since; ``unknown`` without a repository."""
    if not shutil.which("git"):
        return "unknown"
    describe = ("describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+")
    done = subprocess.run(["git", "-C", ROWS.parent, *describe], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
