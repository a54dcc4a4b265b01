"""All ranks beside this one alone, where each execution is what Keras runs: timed, compared, undone."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import train_function
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.errors import OOOError
from tf_ooo.fit.baseline import STEPS, Baseline, stock_steps_s
from tf_ooo.fit.reporting import SlowerWarning
from tf_ooo.fit.timing import timed_run
from tf_ooo.modes.data_parallel.planning import factor_for, stock_step_s
from tf_ooo.report.report import Report
from tf_ooo.report.summary import Gain
from tf_ooo.tracing.traces import trace_count

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep

ALONE = "a rank alone"
# Batches of so many times the rows.
_ROWS = (1, 2, 4, 8)
# A link that was measured before may be wrong by so much.
_MOST_OFF = 64.0
StepSeconds = Callable[[int, int], float]


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
        executions = self._ranks.executions_of_fit()
        # The first one traces, and one still comes when the others have been compared.
        enough = STEPS if executions is None else max(1, min(STEPS, executions - 2))
        if len(self._steps_s) >= enough:
            self._done = True
            return self._beside_alone(iterator)
        outputs, taken_s, traced = timed_run(lambda: self._run(iterator), lambda: trace_count(self._function))
        self._seen += 1
        if traced:
            self._trace_s = max(self._trace_s, taken_s)
        elif self._seen > 1:  # the first one also builds and compares the ranks' models
            self._steps_s.append(taken_s / train_function.steps_per_execution(self._ranks.model))
            self._report.change(steps_s=list(self._steps_s))
        return outputs

    def _beside_alone(self, iterator: object) -> Any:
        """Return one execution, after steps of this rank alone with its first batch."""
        ranks, model = self._ranks, self._ranks.model
        together, left = train_function.steps_per_execution(model), ranks.lockstep.left
        batches = train_function.take(iterator, together if left is None else min(together, left))
        if not batches:
            return self._run(iterator)
        step_s, asked = statistics.median(self._steps_s), self._compare

        def run(least: int) -> list[float]:
            return stock_steps_s(model, batches[0], least, asked is True)

        baseline = Baseline(ALONE, self._report, asked, ranks.steps_of_fit(), always=True)
        try:
            alone_s = baseline.measured(run, step_s, self._trace_s)
        finally:
            ranks.forget_traces()  # of parts of the step, which do not average
        note_alone(self._report, alone_s, ranks)
        return self._run(train_function.iterator_over(batches, iterator))


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


def advice(ranks: int, alone_s: float, step_s: StepSeconds, gain: Gain) -> str:
    """Return one line: how much slower, and how many ranks, or how large batches, to take.

    Args:
        ranks: that train now.
        alone_s: seconds of one rank's step without the others; of larger batches as many times more.
        step_s: predicts the seconds of a step of so many ranks with so many times the rows.
        gain: as measured.
    """
    best, best_ranks, best_rows = 1.0, 1, 1
    for count in range(2, ranks + 1):
        for rows in _ROWS:
            throughput = count * rows * alone_s / step_s(count, rows)
            if throughput > best:
                best, best_ranks, best_rows = throughput, count, rows
    if best_ranks == 1:
        return f"{gain.text}; one rank alone is faster than all that was simulated: python train.py"
    rows_text = f" with batches of {best_rows} times as many rows" if best_rows > 1 else ""
    return f"{gain.text}; by simulation {best_ranks} ranks{rows_text} reach {best:.2f}x the throughput of one"


def from_times(ranks: int, alone_s: float, together_s: float) -> StepSeconds:
    """Estimate step times from two known ones: a ring sends (n - 1) / n of the bytes."""
    sent_s = max(0.0, together_s - alone_s) / ((ranks - 1) / ranks)
    return lambda count, rows: rows * alone_s + sent_s * (count - 1) / count


def from_costs(
    layers: Sequence[LayerCosts], link: Link, alone_s: float, together_s: float, ranks: int, steps: int
) -> StepSeconds:
    """Simulate the stock order, with costs of layers that are made to fit both measured times.

    Work is scaled by what a rank takes alone, messages by what all take.  OOOError: it cannot be simulated.
    """
    factor = alone_s / max(sum(layer.busy_s + layer.update_s for layer in layers), 1e-9)
    fitted = [layer.slowed(factor) for layer in layers]

    def together(times: float) -> float:
        return stock_step_s(fitted, link.slowed(times), ranks, steps)

    between = link.slowed(factor_for(together, together_s, (1 / _MOST_OFF, _MOST_OFF)))

    def step_s(count: int, rows: int) -> float:
        return stock_step_s([layer.scaled(rows) for layer in fitted], between, count, steps)

    return step_s
