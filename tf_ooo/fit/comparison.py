"""Stock against rewritten steps: they take turns, are timed, and the faster is kept on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tf_ooo.fit.reporting import fall_back, fill_times
from tf_ooo.fit.step_times import REWRITTEN, STOCK, Comparison, StepTimes
from tf_ooo.hosts.ranks.base import Engine, SingleEngine
from tf_ooo.options import ModeOptions
from tf_ooo.report.report import Report

AS_ASKED = "applied as asked"


@dataclass(frozen=True)
class Verdict:
    """What is kept.

    Attributes:
        which: name of the step.
        why_not: why that is stock; empty where it is not.
        seconds: of each step's samples the times of the slowest rank.
    """

    which: str
    why_not: str = ""
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)


class StepComparison:
    """Fills in the report's times, and what it says of the verdict.

    Args:
        options: so many steps of each are timed as ``profile_steps``; ``schedule="auto"`` may fall back.
        report: to fill in.
        rewrites: names of the rewritten steps.
        ranks: who decides together; None: this process alone.
        limited: there is a memory limit, which the stock order may not keep.

    Attributes:
        times: of the steps so far.
        stock_may_stay: whether stock steps may be all that ever runs.
    """

    def __init__(
        self,
        options: ModeOptions,
        report: Report,
        rewrites: Sequence[str] = (REWRITTEN,),
        ranks: Engine | None = None,
        limited: bool = False,
    ) -> None:
        self.options, self.report, self._ranks = options, report, ranks or SingleEngine()
        # What stays if the two cannot be mixed comes first.  With a memory limit that is the rewritten
        # one: if it has to be refused, nothing has changed yet.  Strict: a failure shows at the first call.
        self.stock_may_stay = options.may_fall_back and not limited
        stock_first = self.stock_may_stay and not options.strict
        self.times = StepTimes(options.profile_steps, stock_first, rewrites)

    def verdict(self, beside: Mapping[str, Sequence[float]] | None = None) -> Verdict | None:
        """None as long as some are still to be timed; where none are, all ranks call this together.

        Args:
            beside: seconds of other steps, which come with the verdict and are not compared.
        """
        options, report, times = self.options, self.report, self.times
        if not times.done:
            if options.may_fall_back:
                report.undecided = times.progress
            else:
                report.kept_because = AS_ASKED
            return None
        if not options.profile_steps:
            return Verdict(times.first_rewrite)
        everyone = self._ranks.gather(times.seconds | dict(beside or {}))
        seconds = {which: slowest(theirs[which] for theirs in everyone) for which in everyone[0]}
        compared = Comparison.of({which: seconds[which] for which in times.seconds})
        fill_times(report, compared)
        if times.several:
            report.compared = times.shown()
        if options.may_fall_back and compared.why_not:
            return Verdict(STOCK, compared.why_not, seconds)
        return Verdict(compared.best, seconds=seconds)

    def keep_rewritten(self, because: str = "") -> None:
        """Says so; ``because`` of something else than its speed."""
        report = self.report
        report.fell_back, report.fallback_reason, report.undecided = False, "", ""
        report.kept_because = because or ("" if self.options.may_fall_back else AS_ASKED)

    def keep_stock(self, reason: str, logged: bool = False) -> None:
        """Says so; ``logged``: the log has the reason already."""
        fall_back(self.report, reason, logged)
        self.report.undecided = ""


def slowest(times: Iterable[Sequence[float]]) -> list[float]:
    """Of each sample the time of the slowest rank: what every rank waits for."""
    return [max(samples) for samples in zip(*times, strict=False)]
