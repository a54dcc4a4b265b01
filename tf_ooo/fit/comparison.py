"""Compares stock with rewritten steps: they take turns and are timed; all ranks keep the faster."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.options import ModeOptions
from tf_ooo.report.parts import Outcome, Timed
from tf_ooo.report.report import Report
from tf_ooo.units import seconds_text

# Tests which of two steps is faster, on pairs of their times; one may look after every pair. The test is
# Wilcoxon's on the ratios of pairs, one step of each, taken one after the other. If the two take equally
# long, chance says which is the slower one of a pair, whatever the noise is like. Then signs and ranks of
# ratios follow one known law, and so do repeated looks at them. Levels were found by simulating that law:
# looks that are wrong in 2.5% of cases each would together be wrong more often. Libraries of confidence
# sequences (confseq, expectation) need bounds or hundreds of pairs; here are 19.

# Steps of a comparison altogether, the ones that warm up included.
MOST_STEPS = 40
# A gain below 2% is not worth having.
WORTH = 0.02
# Each look, up to that at 19 pairs, has these levels. Over all looks together, equal steps are called faster
# in 2.3% of cases, and a gain of WORTH is called none in 9%: tests/unit/test_sequential.py.
FASTER_LEVEL = 0.0075
NO_GAIN_LEVEL = 0.03


@dataclass(frozen=True)
class Look:
    """Says what the first so many pairs of steps show.

    Either it is sure that the second step is ``faster``, or that there is ``no_gain``: slower, or faster by
    less than WORTH.  ``interval``: the 95% interval of the first step's seconds over the second's, valid
    however often one looks; None: fewer than seven pairs, which tell nothing.
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
    """Compare the seconds of steps that took turns; the end of a longer list is left out.

    The bounds are Hodges' and Lehmann's: means of any two logarithms of ratios are sorted, and as many are
    cut off as the signed-rank test at that level allows.  So the test and the interval always agree.
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
    """Return how many means to cut off at each end; None: too few pairs to reach the level."""
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


STOCK, REWRITTEN = "stock", "rewritten"
# Steps of more kinds than these count as one kind: inputs that are never alike would never be compared.
_MOST_KINDS = 16
_OTHER_KINDS = "others"
# Turns are taken on one kind of step, until another kind is so many times as frequent.
_OUTNUMBERED = 2
# A step that took so many times the median was interrupted and is left out.
_INTERRUPTED = 1.5
# After so many of each of several rewritten steps the best one is compared with stock.
_SELECTED = 2
# The share of the steps whose distance from the median is at most the noise.
_WITHIN_NOISE = 0.75
AS_ASKED = "applied as asked"


class StepTimes:
    """Takes turns; the first step of each kind of input warms up, the next ones are timed.

    Only steps of one kind are compared.  A step in which TensorFlow traced a function is no sample, since it
    did other work, too.  If there are several rewritten steps, the best after a few samples is chosen first.
    That one and stock are then timed anew, because the best of several is often only the luckiest.

    ``profile_steps`` of each are timed; with ``until_sure`` as many as tell which is faster, at most
    :data:`MOST_STEPS` altogether.  Turns depend on the calls of :meth:`add` only, and with one rewritten step
    not on the seconds.
    """

    def __init__(
        self,
        profile_steps: int,
        stock_first: bool,
        rewrites: Sequence[str] = (REWRITTEN,),
        until_sure: bool = False,
    ) -> None:
        self.profile_steps, self.until_sure = profile_steps, until_sure
        # Rounds are over all steps first; then, if they are several, over the best and stock.
        self._rounds = [_Turns((STOCK, *rewrites) if stock_first else (*rewrites, STOCK))]
        self.steps = 0

    @property
    def next(self) -> str:
        return self._rounds[-1].next if self.profile_steps else self.first_rewrite

    @property
    def first_rewrite(self) -> str:
        """Return the first rewritten step that has not been dropped."""
        return next(way for way in self._rounds[0].order if way != STOCK)

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Return the samples that are compared, by step."""
        if self.until_sure:
            return self._rounds[-1].leading()
        return self._rounds[-1].samples(self.profile_steps)

    @property
    def look(self) -> Look:
        """Compare the samples of stock and of the best rewritten step."""
        seconds = dict(self.seconds)
        stock_s = seconds.pop(STOCK)
        return look_at(stock_s, next(iter(seconds.values())) if len(seconds) == 1 else ())

    def add(self, which: str, seconds: float, traced: bool, kind: Hashable = None) -> bool:
        """Take note of a step; return whether it counts.

        ``traced``: TensorFlow traced in it.  ``kind``: equal for steps that do equal work, such as the shapes
        of inputs.
        """
        self.steps += 1
        counts = self._rounds[-1].add(which, seconds, traced, kind)
        if self.several and len(self._rounds) == 1 and self._rounds[0].done(_SELECTED):
            best = Comparison.of(self._rounds[0].samples(_SELECTED)).best
            self._rounds.append(_Turns((STOCK, best), self._rounds[0]))
        return counts

    def drop(self, which: str) -> None:
        self._rounds[0].drop(which)
        if which in self._rounds[-1].order:
            del self._rounds[1:]

    @property
    def done(self) -> bool:
        """Return whether all samples are there, or it is known which is faster, or never will be."""
        if not self.profile_steps:
            return self.steps > 0
        if self.until_sure:
            return self.steps >= MOST_STEPS or self.look.sure
        return all(turns.done(self.profile_steps) for turns in self._rounds)

    @property
    def several(self) -> bool:
        return len(self._rounds[0].order) > 2

    @property
    def progress(self) -> str:
        """Return ``3 of 6 steps timed``."""
        if self.until_sure:
            return f"{self.steps} of at most {MOST_STEPS} steps compared"
        samples = list(self.seconds.values())
        timed = sum(min(len(times_s), self.profile_steps) for times_s in samples)
        return f"{timed} of {len(samples) * self.profile_steps} steps timed"

    def shown(self) -> str:
        """Return the medians, ``stock 12.00 ms, rewritten 11.00 ms``, then those of a second timing."""
        return "; again: ".join(_medians_text(turns.leading()) for turns in self._rounds)


class _Turns:
    """Takes turns among steps that are timed on inputs of several kinds.

    Inputs may alternate, as with a short batch at the end of each epoch: turns by number alone would give it
    to the same step each time.  So turns are taken on one kind, which is known once a step has run. Steps
    have warmed up in the turns ``after`` which these come.
    """

    def __init__(self, order: Sequence[str], after: _Turns | None = None) -> None:
        self.order = tuple(order)
        self._samples: dict[Hashable, dict[str, list[float]]] = {}
        self._runs: dict[Hashable, Counter[str]] = {} if after is None else after._runs
        self._lead: Hashable = None if after is None else after._lead

    @property
    def next(self) -> str:
        """Return the step with fewest samples; among equals the one that ran least, then the first."""
        runs, samples = self._runs.get(self._lead, Counter()), self._samples.get(self._lead, {})
        return min(self.order, key=lambda way: (len(samples.get(way, ())), runs[way]))

    def add(self, which: str, seconds: float, traced: bool, kind: Hashable) -> bool:
        if kind not in self._runs and len(self._runs) >= _MOST_KINDS:
            kind = _OTHER_KINDS
        runs = self._runs.setdefault(kind, Counter())
        counts = which in self.order and runs[which] > 0 and not traced
        runs[which] += 1
        if counts:
            self._samples.setdefault(kind, {}).setdefault(which, []).append(seconds)
        lead = self._runs.get(self._lead)
        if lead is None or runs.total() > _OUTNUMBERED * lead.total():
            self._lead = kind
        return counts

    def drop(self, which: str) -> None:
        self.order = tuple(way for way in self.order if way != which)

    def done(self, enough: int) -> bool:
        """Return whether each step has enough samples on one kind of inputs."""
        return self._complete(enough) is not None

    def leading(self) -> dict[str, list[float]]:
        """Return the samples on the kind of inputs that turns are taken on."""
        samples = self._samples.get(self._lead, {})
        return {way: samples.get(way, []) for way in self.order}

    def samples(self, enough: int) -> dict[str, list[float]]:
        """Return the samples on the first kind of inputs with enough for each step; else :meth:`leading`."""
        return self._complete(enough) or self.leading()

    def _complete(self, enough: int) -> dict[str, list[float]] | None:
        for samples in self._samples.values():
            if all(len(samples.get(way, ())) >= enough for way in self.order):
                return {way: samples[way] for way in self.order}
        return None


@dataclass(frozen=True)
class Comparison:
    """Compares stock and rewritten steps side by side.

    Attributes:
        stock_s, rewritten_s: the medians; with several rewritten steps that of the fastest, ``best``.
        noise_s: within this distance from the median are three of four steps, interrupted ones left out; the
            larger of stock's and the rewritten step's.
    """

    stock_s: float
    rewritten_s: float
    noise_s: float
    best: str = REWRITTEN

    @classmethod
    def of(cls, seconds: Mapping[str, Sequence[float]]) -> Comparison:
        medians_s = {which: statistics.median(times_s) for which, times_s in seconds.items()}
        best = min((which for which in seconds if which != STOCK), key=medians_s.__getitem__)
        noise_s = max(_spread_s(seconds[STOCK]), _spread_s(seconds[best]))
        return cls(medians_s[STOCK], medians_s[best], noise_s, best)

    def why_not_after(self, look: Look, steps: int) -> str:
        """Say why stock is kept, by the test on so many steps; empty: it is not kept."""
        if look.faster:
            return ""
        within = "" if look.interval is None else ", {:.2f}x to {:.2f}x as fast".format(*look.interval)
        unsure = "" if look.sure else f"; it is not sure to be faster after {steps} steps"
        ours, stock = seconds_text(self.rewritten_s), seconds_text(self.stock_s)
        return f"measured {ours} a step against {stock} in stock order{within}{unsure}"


def _spread_s(times_s: Sequence[float]) -> float:
    middle_s = statistics.median(times_s)
    distances_s = sorted(abs(time_s - middle_s) for time_s in times_s if time_s <= _INTERRUPTED * middle_s)
    return distances_s[math.ceil(_WITHIN_NOISE * len(distances_s)) - 1]


def _medians_text(seconds: Mapping[str, Sequence[float]]) -> str:
    middle_s = {which: statistics.median(times_s) for which, times_s in seconds.items() if times_s}
    return ", ".join(f"{which} {seconds_text(time_s)}" for which, time_s in middle_s.items())


@dataclass(frozen=True)
class Verdict:
    """Says which step is kept, and why if that is stock; ``seconds`` are the slowest rank's."""

    which: str
    why_not: str = ""
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)


class StepComparison:
    """Fills in the report's times and the text of the verdict, which all ``ranks`` reach together.

    ``stock_may_stay``: the fit may run stock steps only.  That is not so where the order is asked for, or
    ``limited`` by a memory limit, which the stock order may exceed.  ``asked``: the user wants to know which
    is faster, even if the order stays: steps are timed until that is clear.
    """

    def __init__(
        self,
        options: ModeOptions,
        report: Report,
        rewrites: Sequence[str] = (REWRITTEN,),
        ranks: Engine | None = None,
        limited: bool = False,
        asked: bool = False,
    ) -> None:
        self.options, self.report, self._ranks = options, report, ranks or SingleEngine()
        # The step that stays if the two cannot be mixed comes first. With a memory limit that is the new
        # one: if it has to be refused, nothing has changed yet. Strict: a failure shows at the first call.
        self.stock_may_stay = options.may_fall_back and not limited
        stock_first = self.stock_may_stay and not options.strict
        # To whoever reads the report; a report of a function knows no model.
        several = "the stock order" if self._ranks.size > 1 else "stock Keras"
        self._stock_name = several if report.model else "the stock step"
        self.times = StepTimes(options.profile_steps, stock_first, rewrites, options.may_fall_back or asked)

    def add(self, which: str, seconds: float, traced: bool, kind: Hashable = None) -> bool:
        """Add seconds as :meth:`StepTimes.add` does; all ranks add the slowest's, so they decide alike."""
        if self._ranks.size > 1:
            everyone = self._ranks.gather((seconds, traced))
            seconds, traced = max(each for each, _ in everyone), any(each for _, each in everyone)
        return self.times.add(which, seconds, traced, kind)

    def verdict(self, beside: Mapping[str, Sequence[float]] | None = None) -> Verdict | None:
        """Return None while steps are still to be timed; afterwards all ranks call this together.

        ``beside``: seconds of other steps, which are not compared but come with the verdict.
        """
        may_fall_back, times = self.options.may_fall_back, self.times
        if times.done and not times.profile_steps:
            return Verdict(times.first_rewrite)
        all_timed = all(times.seconds.values())
        if not times.done:  # the fit may end before more is known
            undecided = Outcome(undecided=times.progress)
            self.report.put(undecided if may_fall_back else Outcome(kept_because=AS_ASKED))
            if times.until_sure and not times.several and all_timed:
                self._fill(times)
            return None
        if not all_timed:
            return Verdict(STOCK, f"measured no two steps on equal inputs among {times.steps}")
        everyone = self._ranks.gather(dict(beside or {}))
        slowest_beside = {which: slowest(theirs[which] for theirs in everyone) for which in everyone[0]}
        seconds = times.seconds | slowest_beside
        compared = self._fill(times)
        why_not = compared.why_not_after(times.look, times.steps) if may_fall_back else ""
        return Verdict(STOCK if why_not else compared.best, why_not, seconds)

    def _fill(self, times: StepTimes) -> Comparison:
        """Put the times into the report."""
        compared = Comparison.of(times.seconds)
        timed = Timed(
            list(times.seconds[compared.best]),
            {self._stock_name: list(times.seconds[STOCK])},
            stock_step_s=compared.stock_s,
            measured_step_s=compared.rewritten_s,
            step_noise_s=compared.noise_s,
            in_turns=True,
            decided_interval=times.look.interval if times.until_sure else None,
            compared_steps=times.steps if times.until_sure else 0,
            compared=times.shown() if times.several else "",
            alone_s=self.report.alone_s,
        )
        self.report.put(timed)
        return compared

    def keep_rewritten(self, because: str = "") -> None:
        """Say that the rewritten step stays; ``because``: a reason other than its speed."""
        because = because or ("" if self.options.may_fall_back else AS_ASKED)
        self.report.put(Outcome(kept_because=because))


def slowest(times: Iterable[Sequence[float]]) -> list[float]:
    """Return the slowest rank's time of each sample: every rank waits for it."""
    return [max(samples) for samples in zip(*times, strict=False)]
