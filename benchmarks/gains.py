"""A gain is the median of paired turns, with its 95% interval."""

from collections.abc import Iterable
from itertools import groupby
from math import isnan, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

from benchmarks.case import OURS
from benchmarks.kept import Row

WON, LOST, NO_DIFFERENCE = "won", "lost", "no difference"
# With fewer pairs a resampled median says little: such a gain has no interval, and nothing is won.
LEAST_PAIRS = 6
_RESAMPLES, _SEED = 4999, 0


class Gain(NamedTuple):
    """How many times as fast as a baseline a way is."""

    ratio: float  # the median over turns of the baseline's seconds through the way's, of the same turn
    # The 95% interval of that median by the percentile bootstrap (Efron 1979); nan: too few pairs.
    low: float = nan
    high: float = nan

    @property
    def verdict(self) -> str:
        """``won`` and ``lost`` only where the whole interval lies on that side of 1."""
        return WON if self.low > 1 else LOST if self.high < 1 else NO_DIFFERENCE

    def text(self, digits: int = 2) -> str:
        """Write ``1.12 (1.10 to 1.15)``."""
        ratio, low, high = (f"{value:.{digits}f}" for value in self)
        return ratio if isnan(self.low) else f"{ratio} ({low} to {high})"


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
    low, high = bootstrap((ratios,), np.median, confidence_level=0.95, **how).confidence_interval
    return Gain(middle, float(low), float(high))


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
