"""All ranks beside this one alone, where each execution is what Keras runs: timed, compared, undone."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import iterators, nests, train_function
from tf_ooo.errors import OOOError
from tf_ooo.fit.baseline import STEPS, Baseline, stock_steps_s
from tf_ooo.fit.losing import Losing
from tf_ooo.modes.data_parallel.advice import advice, from_costs, from_times
from tf_ooo.report.gain import Gain
from tf_ooo.report.report import Report
from tf_ooo.tracing import traces

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep

ALONE = "a rank alone"


class StepByStep:
    """In the place of the train function that averages.

    The first executions are timed; then some steps of this rank alone are measured and undone, see
    ``compare=``.
    """

    def __init__(
        self, function: Callable[[Any], Any], ranks: RanksInStep, compare: bool | None, report: Report
    ) -> None:
        self._function, self._ranks, self._report = function, ranks, report
        self._compare = compare
        self._seen, self._first_s = 0, 0.0
        self._done = bool(report.alone_s)

    def __call__(self, iterator: Any) -> Any:
        """One execution.  StopIteration, or TensorFlow's error, at the end of the data."""
        if self._done:
            return self._function(iterator)
        if len(self._report.steps_s) >= STEPS:
            self._done = True
            return self._beside_alone(iterator)
        before, started = traces.trace_count(self._function), time.perf_counter()
        outputs = self._function(iterator)
        nests.synchronize(outputs)
        taken_s = time.perf_counter() - started
        self._first_s, self._seen = self._first_s or taken_s, self._seen + 1
        if traces.trace_count(self._function) == before and self._seen > 1:
            together = train_function.steps_per_execution(self._ranks.model)
            self._report.steps_s.append(taken_s / together)
        return outputs

    def _beside_alone(self, iterator: Any) -> Any:
        """One execution, after steps of this rank alone with its first batch."""
        ranks, model = self._ranks, self._ranks.model
        batches = iterators.take(iterator, train_function.steps_per_execution(model))
        if not batches:
            raise StopIteration
        step_s = statistics.median(self._report.steps_s)
        baseline = Baseline(ALONE, self._report, self._compare, ranks.steps_of_fit())
        try:
            alone_s = baseline.measured(lambda: stock_steps_s(model, batches[0]), step_s, self._first_s)
        finally:
            ranks.forget_traces()  # of parts of the step, which do not average
        note_alone(self._report, alone_s, ranks)
        with train_function.steps_per_execution_set_to(model, len(batches)):
            return self._function(iterators.iterator_over(batches, iterator))


def note_alone(report: Report, alone_s: list[float], ranks: RanksInStep, steps: int = 1) -> None:
    """What this rank takes alone; rank 0 says so where all together are slower.

    ``steps`` go into one function.
    """
    report.alone_s, report.ranks = alone_s, ranks.engine.size
    if ranks.engine.rank or not alone_s:
        return
    losing = Losing()
    losing.advise = functools.partial(_advice, report, steps)
    losing.look(report, report.ranks_gain)


def _advice(report: Report, steps: int, gain: Gain) -> str:
    """By simulation of costs, where they were measured."""
    alone_s, together_s = statistics.median(report.alone_s), statistics.median(report.running_s)
    step_s = from_times(report.ranks, alone_s, together_s)
    if report.costs is not None:
        layers, link = report.costs.layers, report.costs.link
        with contextlib.suppress(OOOError):
            step_s = from_costs(layers, link, alone_s, together_s, report.ranks, steps)
    return advice(report.ranks, alone_s, step_s, gain)
