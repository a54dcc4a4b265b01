"""Tests which of two steps is faster, on pairs of their times; one may look after every pair.

The test is Wilcoxon's on the ratios of pairs, one step of each, taken one after the other.  If the two take
equally long, chance says which is the slower one of a pair, whatever the noise is like; then signs and ranks
of ratios follow one known law, and so does what repeated looks at them show.  Levels were found by simulating
that law: looks that are wrong in 2.5% of cases each would together be wrong more often.

Libraries of confidence sequences (confseq, expectation) need bounds or hundreds of pairs; here are 19.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Steps of a comparison altogether, the ones that warm up included.
MOST_STEPS = 40
# A gain below 2% is not worth having.
WORTH = 0.02
# Each look, up to that at 19 pairs, has these levels. In all of them together equal steps are called faster
# in 2.3% of cases, a gain of WORTH is called none in 9%: tests/unit/test_sequential.py.
FASTER_LEVEL = 0.0075
NO_GAIN_LEVEL = 0.03


@dataclass(frozen=True)
class Look:
    """Says what so many pairs of steps show.

    It is sure that the second step is ``faster``, or that there is ``no_gain``: slower, or faster by less
    than WORTH.  ``interval``: where the first one's seconds over the second one's are, in 95% of cases,
    however often one looks; None: of fewer pairs than seven nothing is known.
    """

    faster: bool
    no_gain: bool
    interval: tuple[float, float] | None
    pairs: int

    @property
    def sure(self) -> bool:
        """Return whether no further pair is needed."""
        return self.faster or self.no_gain


def look_at(stock_s: Sequence[float], ours_s: Sequence[float]) -> Look:
    """Return the seconds of steps that took turns; the last of a longer list is left out.

    The bounds are Hodges' and Lehmann's: means of any two logarithms of ratios, sorted, without as many as
    the signed-rank test at that level allows.  So the test and the interval never say different things.
    """
    ratios = [math.log(stock / ours) for stock, ours in zip(stock_s, ours_s, strict=False)]
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(ratios, 2))
    left_out = _left_out(len(ratios), FASTER_LEVEL)
    of_no_gain = _left_out(len(ratios), NO_GAIN_LEVEL)
    no_gain = of_no_gain is not None and means[-1 - of_no_gain] < math.log1p(WORTH)
    if left_out is None:
        return Look(False, no_gain, None, len(ratios))
    low, high = means[left_out], means[-1 - left_out]
    return Look(low > 0, no_gain, (math.exp(low), math.exp(high)), len(ratios))


@functools.cache
def _left_out(pairs: int, level: float) -> int | None:
    """Return how many means to leave out at an end; None: too few pairs to reach the level."""
    below, count = 0.0, 0
    for ways in _rank_sums(pairs):
        below += ways / 2**pairs
        if below > level:
            break
        count += 1
    return count - 1 if count else None


def _rank_sums(pairs: int) -> list[int]:
    """Return how many of the 2^pairs sets of numbers from 1 to ``pairs`` have each sum, from 0 on."""
    ways = [1]
    for rank in range(1, pairs + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    return ways
