"""Seconds of stock and rewritten steps, and which of the two the next step is to run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STOCK, REWRITTEN = "stock", "rewritten"


class StepTimes:
    """Takes turns; the first step of each warms up, ``profile_steps`` of each are timed.

    A step in which TensorFlow traced a function is no sample: it did other work than a step does.

    Args:
        profile_steps: of each.
        stock_first: whether the first step is a stock one.
        rewrites: names of the rewritten steps.
    """

    def __init__(self, profile_steps: int, stock_first: bool, rewrites: Sequence[str] = (REWRITTEN,)) -> None:
        self.profile_steps = profile_steps
        self._order = (STOCK, *rewrites) if stock_first else (*rewrites, STOCK)
        self.seconds: dict[str, list[float]] = {name: [] for name in (STOCK, *rewrites)}
        self._first_rewrite = rewrites[0]
        self._steps = 0

    @property
    def next(self) -> str:
        """What the next step is to run."""
        return self._order[self._steps % len(self._order)] if self.profile_steps else self._first_rewrite

    def add(self, which: str, seconds: float, traced: bool) -> bool:
        """Takes note of a step; returns whether it counts."""
        self._steps += 1
        counts = self._steps > len(self._order) and not traced and which in self.seconds
        if counts:
            self.seconds[which].append(seconds)
        return counts

    def drop(self, which: str) -> None:
        """Takes a rewrite out that cannot run; the first one asked for takes its place."""
        self._order = tuple(name for name in self._order if name != which)
        self.seconds.pop(which, None)
        if which == self._first_rewrite:
            self._first_rewrite = next(name for name in self._order if name != STOCK)

    @property
    def done(self) -> bool:
        """Whether all were timed as often as asked."""
        return self._steps > 0 and min(map(len, self.seconds.values())) >= self.profile_steps

    @property
    def progress(self) -> str:
        """``3 of 6 steps timed``."""
        timed = sum(min(len(times), self.profile_steps) for times in self.seconds.values())
        return f"{timed} of {len(self._order) * self.profile_steps} steps timed"

    def shown(self) -> str:
        """``stock 12.00 ms, rewritten 11.00 ms``, the medians."""
        middle_s = {which: statistics.median(times_s) for which, times_s in self.seconds.items() if times_s}
        return ", ".join(f"{which} {time_s * 1e3:.2f} ms" for which, time_s in middle_s.items())


@dataclass(frozen=True)
class Comparison:
    """Stock and rewritten steps side by side.

    Attributes:
        stock_s, rewritten_s: the medians, of several rewritten steps that of the fastest, ``best``.
        noise_s: the larger of the two median distances from the median: one slow step does not count.
    """

    stock_s: float
    rewritten_s: float
    noise_s: float
    best: str = REWRITTEN

    @classmethod
    def of(cls, seconds: Mapping[str, Sequence[float]]) -> Comparison:
        """Compares ``StepTimes.seconds``."""
        middle_s = {which: statistics.median(times_s) for which, times_s in seconds.items()}
        best = min((which for which in seconds if which != STOCK), key=middle_s.__getitem__)
        noise_s = max(_spread_s(seconds[STOCK]), _spread_s(seconds[best]))
        return cls(middle_s[STOCK], middle_s[best], noise_s, best)

    @property
    def why_not(self) -> str:
        """Why the rewritten step is not worth keeping; empty where it is faster by more than the noise."""
        if self.rewritten_s < self.stock_s - self.noise_s:
            return ""
        return (
            f"measured {self.rewritten_s * 1e3:.2f} ms a step against {self.stock_s * 1e3:.2f} ms in stock "
            f"order, noise {self.noise_s * 1e3:.2f} ms"
        )


def _spread_s(times_s: Sequence[float]) -> float:
    middle_s = statistics.median(times_s)
    return statistics.median(abs(time_s - middle_s) for time_s in times_s)
