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
from tf_ooo.fit.slower_warning import SlowerWarning
from tf_ooo.modes.data_parallel.advice import advice, from_costs, from_times
from tf_ooo.report.gain import Gain
from tf_ooo.report.report import Report
from tf_ooo.tracing import traces

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep

ALONE = "a rank alone"


class StepByStep:
    """Takes the place of a training's ``run``; stays for the fits of one model.

    The first executions of a fit are timed; then some steps of this rank alone are measured and undone.

    Args:
        function: the train function that averages, which is traced in executions.
        compare: as of the mode's options.
        report: gets the seconds.
    """

    _run: Callable[[Any], Any]
    _ranks: RanksInStep

    def __init__(self, function: Callable[[Any], Any], compare: bool | None, report: Report) -> None:
        self._function, self._compare, self._report = function, compare, report
        self._trace_s = 0.0  # the longest execution in which the function was traced

    def begin(self, run: Callable[[Any], Any], ranks: RanksInStep) -> None:
        """Begin a fit: ``run`` is one execution of all ``ranks``."""
        self._run, self._ranks = run, ranks
        self._seen, self._done = 0, bool(self._report.alone_s)
        self._steps_s: list[float] = []
        if not self._done:
            self._report.change(steps_s=[])

    def __call__(self, iterator: object) -> Any:
        """Return one execution.  Raises what ``run`` does."""
        if self._done:
            return self._run(iterator)
        if len(self._steps_s) >= STEPS:
            self._done = True
            return self._beside_alone(iterator)
        before, started = traces.trace_count(self._function), time.perf_counter()
        outputs = self._run(iterator)
        nests.synchronize(outputs)
        taken_s = time.perf_counter() - started
        self._seen += 1
        if traces.trace_count(self._function) > before:
            self._trace_s = max(self._trace_s, taken_s)
        elif self._seen > 1:  # the first one also builds and compares the ranks' models
            self._steps_s.append(taken_s / train_function.steps_per_execution(self._ranks.model))
            self._report.change(steps_s=list(self._steps_s))
        return outputs

    def _beside_alone(self, iterator: object) -> Any:
        """Return one execution, after steps of this rank alone with its first batch."""
        ranks, model = self._ranks, self._ranks.model
        together, left = train_function.steps_per_execution(model), ranks.lockstep.left
        batches = iterators.take(iterator, together if left is None else min(together, left))
        if not batches:
            return self._run(iterator)
        step_s = statistics.median(self._steps_s)
        baseline = Baseline(ALONE, self._report, self._compare, ranks.steps_of_fit())
        try:
            alone_s = baseline.measured(lambda: stock_steps_s(model, batches[0]), step_s, self._trace_s)
        finally:
            ranks.forget_traces()  # of parts of the step, which do not average
        note_alone(self._report, alone_s, ranks)
        return self._run(iterators.iterator_over(batches, iterator))


def note_alone(report: Report, alone_s: list[float], ranks: RanksInStep, steps: int = 1) -> None:
    """Note this rank's time alone; rank 0 says so where all together are slower.

    ``steps`` go into one function.
    """
    report.change(alone_s=alone_s)
    if ranks.engine.rank or not alone_s:
        return
    slower_warning = SlowerWarning()
    slower_warning.advise = functools.partial(_advice, report, steps)
    slower_warning.look(report, report.ranks_gain)


def _advice(report: Report, steps: int, gain: Gain) -> str:
    """Advise by simulation of costs, where they were measured."""
    alone_s, together_s = statistics.median(report.alone_s), statistics.median(report.running_s)
    step_s = from_times(report.ranks, alone_s, together_s)
    if report.costs is not None:
        layers, link = report.costs.layers, report.costs.link
        with contextlib.suppress(OOOError):
            step_s = from_costs(layers, link, alone_s, together_s, report.ranks, steps)
    return advice(report.ranks, alone_s, step_s, gain)
