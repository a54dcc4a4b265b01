"""Decides whether the rest of a fit pays for measuring something beside it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from tf_ooo.units import about_count, about_text

# A fit that does not pay for a comparison gets so many steps of stock beside it, to be compared roughly.
FEW = 3
# A measurement may take this share of the rest of the fit.
MOST = 0.05
# On one CPU device TensorFlow runs whatever is ready on all cores.  `python -m benchmarks run one_cpu`, ten
# models in two orders: none was faster, twelve of twenty were surely slower, by up to a fifth.
ORDERS_MAY_GAIN_ON_CPU = False
ON_CPU = "on one CPU device the order of steps gains nothing; compare=True compares"
# Steps that are timed before it is asked, after those in which TensorFlow traces.
_TIMED = 3
# All steps of a comparison train.  A rewritten step that takes twice as long as stock shows it in six pairs,
# after one step that warms up: seven steps are lost.
_LOST_STEPS = 7


def pays(cost_s: float, step_s: float, steps: float) -> bool:
    """Return whether ``cost_s`` make so many steps of so many seconds no more than 5% longer."""
    return cost_s <= MOST * steps * step_s


@dataclass
class Budget:
    """Counts the stock steps of a fit, up to where a comparison begins or is not worth its cost.

    Attributes:
        ways: rewritten steps that are compared: each is traced.
        steps: of the fit; None: as many as its executions have, of which an epoch's last one may have fewer.
        beside_s: seconds that a comparison takes beside traces and steps, such as planning.
        executions: of the fit; None: nobody knows, and those that have run must pay.
        together: steps in one execution.
        trace_s: seconds of the execution that traced; of an earlier fit, if there was one.
        seen: executions of this fit.
        why_not: why stock is kept in this fit; empty as long as that is open.
        begins: whether it is time to compare.
    """

    ways: int = 1
    executions: int | None = None
    together: int = 1
    trace_s: float = 0.0
    seen: int = 0
    why_not: str = ""
    begins: bool = False
    beside_s: float = 0.0
    steps: int | None = None
    _times_s: list[float] = field(default_factory=list)

    @property
    def untimed(self) -> bool:
        """Return whether the next execution is to be timed."""
        return len(self._times_s) < _TIMED

    @property
    def execution_s(self) -> float:
        """The median; 0 before one was timed."""
        return statistics.median(self._times_s) if self._times_s else 0.0

    @property
    def steps_s(self) -> list[float]:
        """Seconds of single steps, as far as they were timed."""
        return [time_s / self.together for time_s in self._times_s]

    @property
    def cost_s(self) -> float:
        """About what a comparison takes; the first trace tells how long another one does."""
        trace_s = max(0.0, self.trace_s - self.execution_s)
        return self.ways * trace_s + _LOST_STEPS * self.execution_s + self.beside_s

    @property
    def waits(self) -> str:
        """Say what is waited for."""
        if not self._times_s:
            return "stock steps run first"
        return (
            f"nobody knows how many steps come: a comparison of about {about_text(self.cost_s)} begins after "
            f"{self._needed}; compare=True begins at once"
        )

    @property
    def _needed(self) -> int:
        """Return the steps that pay for a comparison."""
        return math.ceil(self.cost_s / (MOST * self.execution_s)) * self.together

    def add(self, seconds: float | None, traced: bool) -> None:
        """An execution has run; ``seconds`` if it was timed."""
        self.seen += 1
        if traced and seconds is not None:
            self.trace_s = max(self.trace_s, seconds)
        elif seconds is not None and self.untimed:
            self._times_s.append(seconds)
        if self.why_not:  # for another reason than what it costs
            return
        left = None if self.executions is None else self.executions - self.seen
        if self.untimed and (left is None or left > 0):
            return
        self.begins = pays(self.cost_s, self.execution_s, self.seen if left is None else left)
        if left is not None and not self.begins:
            self.why_not = self._too_few()

    def _too_few(self) -> str:
        count = (self.executions or 0) * self.together if self.steps is None else self.steps
        steps = f"{count} steps"
        if not self._times_s:
            return f"{steps} are too few to pay for a comparison; compare=True compares"
        each, cost = about_text(self.execution_s / self.together), about_text(self.cost_s)
        enough = about_count(self._needed + self.seen * self.together)
        return (
            f"{steps} of {each} are too few to pay for a comparison of about {cost}: about {enough} would; "
            "compare=True compares"
        )
