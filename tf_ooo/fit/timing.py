"""Times steps, says how long work takes, and decides whether the rest of a fit pays for measuring."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from grappler_passes.later import if_it_takes
from tf_ooo.compat import keras_fits, nests
from tf_ooo.units import about_count, about_text


def timed_run(
    run: Callable[[], Any], traces: Callable[[], int], wait: bool = True
) -> tuple[Any, float, bool]:
    """Run once, and wait for the outputs unless told otherwise; ``traces`` counts what was traced so far.

    Returns the outputs, the seconds until they were there, and whether something was traced meanwhile.
    """
    before, started = traces(), time.perf_counter()
    outputs = run()
    if wait:
        nests.synchronize(outputs)
    return outputs, time.perf_counter() - started, traces() > before


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
        """The number of steps that pay for a comparison."""
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


# In six models a step in 4 and in 8 micro-batches took 5 to 20 and 9 to 23 times as long as a forward and
# backward pass that is traced alone, a stock step 6 to 9 times, placing a fifth to a third of the step that
# was traced before it, and comparing rows 1.8 to 2.7 times as long as tracing the first such pass.
_WHOLE = 8.0


def micro_batches_s(pass_s: float, microbatches: int) -> float:
    """Return seconds of a first step in micro-batches; ``pass_s``: of the pass that was traced alone."""
    return (_WHOLE + microbatches) * pass_s


def look_s(first_pass_s: float) -> float:
    """Return seconds in which rows are compared; ``first_pass_s``: of the first pass that was traced."""
    return 2.0 * first_pass_s


def stock_s(first_s: float, microbatches: int) -> float:
    """Return seconds of a first stock step; ``first_s``: of the one in micro-batches."""
    return first_s * _WHOLE / (_WHOLE + microbatches)


def placing_s(first_s: float) -> float:
    """Return seconds in which a step that was traced for one device is placed on several."""
    return 0.25 * first_s


def pays_from(spent_s: float, one_s: float, ours_s: float | None) -> str:
    """Say from how many steps on what was ``spent_s`` is gained back; empty: nobody knows.

    ``spent_s``: without what stock would have taken.  ``one_s``: of a stock step; ``ours_s``: of one on
    several devices, as predicted.
    """
    if ours_s is None:
        return ""
    if ours_s >= one_s:
        return "; no gain over one device is predicted"
    return f"; it pays from about {about_count(spent_s / (one_s - ours_s))} steps on"


# Shorter work is not talked of.
AFTER_S = 2.0


@contextlib.contextmanager
def said(what: str, about_s: float = 0.0, more: str = "") -> Iterator[Callable[[float], None]]:
    """Says on stderr what is going on inside of the block, if that takes long; not in ``fit(verbose=0)``.

    ``about_s``: seconds that it will take, as far as is known; 0: nothing is.  ``more`` is said behind that.
    Yields a function to call with the seconds where they are known later.
    """
    verbose = keras_fits.argument_of_fit("verbose")
    if verbose in (0, None):
        yield lambda seconds: None
        return
    started, shown = time.perf_counter(), threading.Event()
    # After the first batch Keras' progress bar ends without a new line.
    line = "\n" if verbose != 2 and keras_fits.argument_of_fit("begin_step") else ""

    def begin(seconds: float = 0.0) -> None:
        if shown.is_set() and not seconds:
            return
        about = f", about {about_text(seconds)}" if seconds else ""
        click.echo(f"{'' if shown.is_set() else line}tf_ooo: {what}{about}{more} ...", err=True)
        shown.set()

    def begin_if_long(seconds: float) -> None:
        if seconds > AFTER_S:
            begin(seconds)

    begin_if_long(about_s)
    try:
        with contextlib.nullcontext() if shown.is_set() else if_it_takes(AFTER_S, begin):
            yield begin_if_long
    finally:
        if shown.is_set():
            click.echo(f"tf_ooo: {what}: {time.perf_counter() - started:.1f} s", err=True)
