"""Computes how much faster a step is than another: the first thing that a report says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tf_ooo.units import seconds_text

# This belongs to the standard normal distribution: an interval holds the ratio in 95 of 100 cases.
_TWO_SIDED_95 = 1.96
# A machine that others use changes its speed by so much from one group of steps to the next, at least: equal
# short fits differed by 11% and 13%.
_LEAST_DRIFT = 0.1
# Steps whose median tells how fast the machine was.
_GROUP = 6
# Two ways to measure a step differ by no more than that, if the machine was as fast.
_NOT_ALIKE = 2.0


@dataclass(frozen=True)
class Gain:
    """Measured steps beside those of a baseline.

    Attributes:
        baseline: what it is compared with, ``"stock Keras"`` or ``"one device"``.
        baseline_s, ours_s: seconds of single steps, at least one of each.
        decided: the interval by which steps in turns were compared, which is good for repeated looks; None:
            calculated from the seconds.
        in_turns: whether steps of both took turns; if not, one group ran before the other, and the machine
            may have been faster then.
        elsewhere_s: about what a step of the baseline took at another moment; 0: that is not known.
    """

    baseline: str
    baseline_s: Sequence[float]
    ours_s: Sequence[float]
    decided: tuple[float, float] | None = None
    in_turns: bool = False
    elsewhere_s: float = 0.0

    @property
    def baseline_median_s(self) -> float:
        return statistics.median(self.baseline_s)

    @property
    def ours_median_s(self) -> float:
        return statistics.median(self.ours_s)

    @property
    def ratio(self) -> float:
        """The baseline's median over ours: above 1 is faster."""
        return self.baseline_median_s / self.ours_median_s

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return where the ratio is with 95% confidence; None: too few steps to say.

        Of steps that did not take turns it is wider by :attr:`drift` at both ends.
        """
        if self.decided is not None:
            return self.decided
        within = self._within_groups
        if within is None or self.in_turns:
            return within
        return within[0] / (1 + self.drift), within[1] * (1 + self.drift)

    @property
    def drift(self) -> float:
        """The share by which the machine may have been slower for one group of steps than for the other.

        As far as the medians of a few steps, one after the other, were from the median of all of their kind,
        or the baseline's from what its step took at another moment; at least 10%.
        """
        slowed = self.baseline_median_s / self.elsewhere_s if self.elsewhere_s else 1.0
        between = slowed - 1 if slowed > _NOT_ALIKE else 0.0
        return max(_LEAST_DRIFT, _moved(self.baseline_s), _moved(self.ours_s), between)

    @property
    def _within_groups(self) -> tuple[float, float] | None:
        """Return the interval as if both groups had run at the same time.

        The Hodges-Lehmann interval: the ratios of all pairs of steps, without as many of the lowest and the
        highest as the Mann-Whitney test allows.  An interrupted step moves it little.
        """
        ours, theirs = len(self.ours_s), len(self.baseline_s)
        pairs = ours * theirs
        deviation = math.sqrt(pairs * (ours + theirs + 1) / 12)
        left_out = math.floor(pairs / 2 - _TWO_SIDED_95 * deviation)
        if left_out < 1:
            return None
        ratios = sorted(baseline_s / our_s for baseline_s in self.baseline_s for our_s in self.ours_s)
        return ratios[left_out - 1], ratios[pairs - left_out]

    @property
    def faster(self) -> bool:
        """Return whether it is sure that ours is faster."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def slower(self) -> bool:
        """Return whether it is sure that ours is slower."""
        return self.interval is not None and self.interval[1] < 1

    @property
    def text(self) -> str:
        """Say it in plain words, with both times, the number of steps and the interval."""
        ours, baseline = seconds_text(self.ours_median_s), seconds_text(self.baseline_median_s)
        times = f"{ours} a step instead of {baseline} ({self.basis})"
        if self.slower:
            return f"slower than {self.baseline}: {times}"
        if self.faster:
            about = "" if self._took_turns else "about "
            return f"{about}{self.ratio:.2f}x faster than {self.baseline}: {times}"
        return f"no sure gain over {self.baseline}: {times}"

    @property
    def basis(self) -> str:
        """``12 + 12 steps, 95% interval 1.19-1.29``; ``5 + 20 steps, not in turns, ...``."""
        steps = f"{len(self.baseline_s)} + {len(self.ours_s)} steps"
        return f"{steps}{'' if self._took_turns else ', not in turns'}, {self.interval_text}"

    @property
    def _took_turns(self) -> bool:
        return self.in_turns or self.decided is not None

    @property
    def ratio_text(self) -> str:
        """``0.98-1.03x``, without an interval ``1.01x``."""
        return f"{self.ratio:.2f}x" if self.interval is None else "{:.2f}-{:.2f}x".format(*self.interval)

    @property
    def interval_text(self) -> str:
        """``95% interval 1.19-1.29``."""
        if self.interval is None:
            return f"{self.ratio:.2f}x, too few for an interval"
        low, high = self.interval
        return f"95% interval {low:.2f}-{high:.2f}"


def _moved(times_s: Sequence[float]) -> float:
    """Return the greatest distance of a group's median from that of all, as a share."""
    starts = range(0, len(times_s) - _GROUP + 1, _GROUP)
    middle_s = statistics.median(times_s)
    medians_s = (statistics.median(times_s[start : start + _GROUP]) for start in starts)
    return max((max(middle_s / each_s, each_s / middle_s) - 1 for each_s in medians_s), default=0.0)
