"""A gain is the median of paired turns, with its 95% interval."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from benchmarks.case import OURS, PYTORCH, STOCK
from benchmarks.kept import Row

WON, LOST, NO_DIFFERENCE = "won", "lost", "no difference"
# With fewer pairs a resampled median says little: such a gain has no interval, and nothing is won.
LEAST_PAIRS = 6
_CONFIDENCE, _RESAMPLES, _SEED = 0.95, 4999, 0


@dataclass(frozen=True)
class Gain:
    """How many times as fast as a baseline a way is.

    Attributes:
        ratio: the median over turns of the baseline's seconds through the way's, of the same turn.
        low, high: the 95% interval of that median by the percentile bootstrap (Efron 1979); None: there are
            fewer than :data:`LEAST_PAIRS` pairs.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """``won`` and ``lost`` only where the whole interval lies on that side of 1."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return NO_DIFFERENCE
        return WON if self.low > 1 else LOST


def gain_of(baseline_s: Sequence[float], ours_s: Sequence[float]) -> Gain:
    """Compare two ways turn by turn.

    Raises:
        ValueError: there are no turns, or not equally many of both.
    """
    if not len(ours_s) or len(baseline_s) != len(ours_s):
        raise ValueError(f"{len(baseline_s)} turns of the baseline and {len(ours_s)} of ours are no pairs")
    ratios = np.asarray(baseline_s) / np.asarray(ours_s)
    middle = float(np.median(ratios))
    if len(ratios) < LEAST_PAIRS:
        return Gain(middle, None, None, len(ratios))
    resampled = bootstrap(
        (ratios,),
        np.median,
        confidence_level=_CONFIDENCE,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    )
    low, high = resampled.confidence_interval
    return Gain(middle, float(low), float(high), len(ratios))


@dataclass(frozen=True)
class Compared:
    """Ours beside a baseline of the same run."""

    ours: Row
    baseline: Row
    gain: Gain

    @property
    def predicted(self) -> float | None:
        """The gain that both plans promised before the run; None where one of them had none."""
        if not self.baseline.predicted_s or not self.ours.predicted_s:
            return None
        return self.baseline.predicted_s / self.ours.predicted_s


def turns_of(row: Row) -> list[float]:
    """Return what turns of a run are compared by: seconds of a step.

    Beside torch they are parts of the same framework's step on one worker, so that kernels do not count.
    """
    alone_s = row.about["serial_s"] if row.mode == "torch" else 1.0
    return [seconds / alone_s for seconds in row.turns_s]


def strongest(rows: Iterable[Row], had_by: Sequence[str] = (STOCK, PYTORCH)) -> Row | None:
    """Return the fastest baseline of a run, by the median of its turns."""
    there = [row for row in rows if row.baseline and row.had_by in had_by]
    return min(there, key=lambda row: statistics.median(turns_of(row)), default=None)


def ours_of(rows: Iterable[Row]) -> Row | None:
    """Return our way of a run."""
    return next((row for row in rows if row.had_by == OURS), None)


def runs_of(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by the run whose ways took turns with each other."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    return runs


def compared(rows: Iterable[Row]) -> list[Compared]:
    """Compare ours in each run with the strongest baseline there."""
    beside = []
    for of_run in runs_of(rows).values():
        ours, baseline = ours_of(of_run), strongest(of_run)
        if ours is not None and baseline is not None:
            beside.append(Compared(ours, baseline, gain_of(turns_of(baseline), turns_of(ours))))
    return beside
