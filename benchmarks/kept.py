"""Rows that stay: one file for each run of a case; gains are medians of paired turns, with 95% intervals."""

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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

from benchmarks.cases import OURS, Case, Measured

ROWS = Path(__file__).with_name("rows")
SAME, DIFFERS = "stock", "differs"
WON, LOST, NO_DIFFERENCE = "won", "lost", "no difference"
# With fewer pairs a resampled median says little: such a gain has no interval, and nothing is won.
LEAST_PAIRS = 6
_RESAMPLES, _SEED = 4999, 0
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "torch")


@dataclass(frozen=True)
class Row:
    """One run of one way."""

    run: str  # is shared by all ways that took turns with each other; turns of one number are a pair
    suite: str
    case: str
    mode: str
    way: str
    had_by: str  # who can have the way (benchmarks.cases)
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
        return statistics.median(self.turns_s)


def rows_of(suite: str, case: Case, measured: Measured, began: datetime.datetime) -> list[Row]:
    """Return one row for each way that ran."""
    shared: dict[str, Any] = {"run": f"{began:%Y-%m-%d %H:%M:%S} {case.name}", "suite": suite}
    shared |= {"case": case.name, "mode": case.mode, "cores": measured.cores, "machine": machine()}
    shared |= {"commit": commit(), "command": shlex.join(["python", *sys.orig_argv[1:]])}
    ways = [(way, measured.ways[way.name]) for way in case.ways if way.name in measured.ways]
    stock = measured.stock_bits
    return [
        Row(
            **shared,
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


class Gain(NamedTuple):
    """How many times as fast as a baseline a way is."""

    ratio: float  # the median over turns of the baseline's seconds through the way's, of the same turn
    # The 95% interval of that median by the percentile bootstrap (Efron 1979); nan: too few pairs.
    low: float = np.nan
    high: float = np.nan

    @property
    def verdict(self) -> str:
        """``won`` and ``lost`` only where the whole interval lies on that side of 1."""
        return WON if self.low > 1 else LOST if self.high < 1 else NO_DIFFERENCE

    def text(self, digits: int = 2) -> str:
        """Write ``1.12 (1.10 to 1.15)``."""
        ratio, low, high = (f"{value:.{digits}f}" for value in self)
        return ratio if np.isnan(self.low) else f"{ratio} ({low} to {high})"


def gain_of(baseline_s: ArrayLike, ours_s: ArrayLike) -> Gain:
    """Compare two ways turn by turn; ValueError: there are no turns, or not equally many of both."""
    baseline, ours = np.asarray(baseline_s), np.asarray(ours_s)
    if not ours.size or baseline.size != ours.size:
        raise ValueError(f"{baseline.size} turns of the baseline and {ours.size} of ours are no pairs")
    ratios = baseline / ours
    middle = float(np.median(ratios))
    if len(ratios) < LEAST_PAIRS:
        return Gain(middle)
    how = {"n_resamples": _RESAMPLES, "method": "percentile", "rng": np.random.default_rng(_SEED)}
    interval = bootstrap((ratios,), np.median, confidence_level=0.95, **how).confidence_interval
    return Gain(middle, *map(float, interval))


class Compared(NamedTuple):
    """Ours beside the strongest baseline of the same run."""

    ours: Row
    baseline: Row
    gain: Gain

    @property
    def predicted(self) -> float | None:
        """The gain that both plans promised before the run; None where one of them had none."""
        if not self.baseline.predicted_s or not self.ours.predicted_s:
            return None
        return self.baseline.predicted_s / self.ours.predicted_s


def turns_of(row: Row) -> np.ndarray:
    """Return what turns of a run are compared by: seconds of a step.

    Beside torch they are parts of the same framework's step on one worker, so that kernels do not count.
    """
    return np.array(row.turns_s) / (row.about["serial_s"] if row.mode == "torch" else 1.0)


def gain_over(baselines: Iterable[Row], run: Iterable[Row]) -> Compared | None:
    """Compare ours in a run with the fastest baseline by the median of its turns; None: one is missing."""
    fastest = min(baselines, key=lambda row: np.median(turns_of(row)), default=None)
    ours = next((row for row in run if row.had_by == OURS), None)
    if ours is None or fastest is None:
        return None
    return Compared(ours, fastest, gain_of(turns_of(fastest), turns_of(ours)))


def runs_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows by the run whose ways took turns with each other."""
    return [list(run) for _, run in groupby(rows, lambda row: row.run)]


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Compare ours in each run with the strongest baseline there."""
    beside = (gain_over((row for row in run if row.baseline), run) for run in runs_of(rows))
    return [of for of in beside if of is not None]


def largest_difference(weights: Sequence[Any], stock: Sequence[Any]) -> float:
    """Return the largest difference of a weight from stock's, as a part of the largest weight of all.

    Tensors are not taken one by one: the bias of attention's keys has no gradient but noise, so all of it
    differs.
    """
    apart = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(weights, stock, strict=True))
    return apart / max(float(np.abs(theirs).max()) for theirs in stock)
