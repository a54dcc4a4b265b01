"""Seconds of stock and rewritten steps, and which of the two the next step is to run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

STOCK, REWRITTEN = "stock", "rewritten"


class StepTimes:
    """Alternates between the two; the first step of each warms up, ``profile_steps`` of each are timed.

    A step in which TensorFlow traced a function is no sample: it did other work than a step does.
    """

    def __init__(self, profile_steps: int, stock_first: bool) -> None:
        self.profile_steps = profile_steps
        self.seconds: dict[str, list[float]] = {STOCK: [], REWRITTEN: []}
        self._order = (STOCK, REWRITTEN) if stock_first else (REWRITTEN, STOCK)
        self._steps = 0

    @property
    def next(self) -> str:
        """What the next step is to run."""
        return self._order[self._steps % 2] if self.profile_steps else REWRITTEN

    def add(self, which: str, seconds: float, traced: bool) -> bool:
        """Takes note of a step; returns whether it counts."""
        self._steps += 1
        counts = self._steps > 2 and not traced
        if counts:
            self.seconds[which].append(seconds)
        return counts

    @property
    def done(self) -> bool:
        """Whether both were timed as often as asked."""
        return self._steps > 0 and min(map(len, self.seconds.values())) >= self.profile_steps

    @property
    def progress(self) -> str:
        """``3 of 6 steps timed``."""
        timed = sum(min(len(times), self.profile_steps) for times in self.seconds.values())
        return f"{timed} of {2 * self.profile_steps} steps timed"

    def medians_s(self) -> tuple[float, float]:
        """Of the stock and of the rewritten steps."""
        return statistics.median(self.seconds[STOCK]), statistics.median(self.seconds[REWRITTEN])

    def noise_s(self) -> float:
        """The larger of the two median distances from the median: one slow step does not count."""
        return max(map(_spread_s, self.seconds.values()))


def _spread_s(times_s: Sequence[float]) -> float:
    middle_s = statistics.median(times_s)
    return statistics.median(abs(time_s - middle_s) for time_s in times_s)
