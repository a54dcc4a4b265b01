"""Runs a training step as stock or rewritten, times both, keeps the faster.

Every call runs exactly one of the two, so the training state advances once a call; their results are the same
bits, so it does not matter which one runs.  One thing forbids alternating: random numbers drawn from a state
that each compiled op keeps to itself (``tf.random.normal`` and friends; Keras' own layers keep theirs in
variables).  Both steps are searched for such ops before the first one runs.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tf_ooo.compat import nests
from tf_ooo.costs.profile import StepProfiler, step_costs
from tf_ooo.errors import BackendError, GraphError, MemoryLimitError, OOOError
from tf_ooo.fit.comparison import REWRITTEN, STOCK, StepComparison, Verdict
from tf_ooo.fit.mode import Comparing, Experiment, StockFirst, Training, Turn
from tf_ooo.fit.timing import Budget, timed_run
from tf_ooo.options import OneDeviceOptions
from tf_ooo.planning.model.task import Task
from tf_ooo.planning.simulation.measured import one_by_one
from tf_ooo.report.parts import Outcome, fall_back
from tf_ooo.report.report import NOT_PREDICTED, Report
from tf_ooo.rewriting.lowering import tasks_of_ops
from tf_ooo.rewriting.request import StepSession
from tf_ooo.rewriting.result import RewriteResult, fill_plan
from tf_ooo.tracing import traces
from tf_ooo.tracing.traces import Inputs

_LOG = logging.getLogger("tf_ooo")
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a step is called with
_CHANGED = "traced again, the step is another than it was: something that it reads in Python has changed"


class StepController:
    """Stands in the place of the step, called from any thread; its ``experiment`` says which step runs.

    Args:
        stock, rewritten: the step as TensorFlow runs it, and as a function of its own, not traced yet.
        session: traced functions are rewritten inside ``session.tracing()``.
        inputs: finds the real sizes of batches, for the memory limit.
        on_decided: called once it is known which of the two is kept.
        more_steps: more rewritten steps by name; the fastest of all is kept.
        samples_seen: tells how many samples the steps so far have seen, where arguments do not show it.
        never_pays: why ``"auto"`` compares nothing unless it is asked to.

    Raises (from a call): whatever the step raises; MemoryLimitError, before the step has changed
    anything; with ``strict`` also why a rewrite failed, after the first step has run.
    """

    def __init__(
        self,
        stock: Callable[..., Any],
        rewritten: Callable[..., Any],
        session: StepSession,
        options: OneDeviceOptions,
        report: Report,
        inputs: Inputs | None = None,
        on_decided: Callable[[], None] | None = None,
        more_steps: Mapping[str, Callable[..., Any]] | None = None,
        samples_seen: Callable[[], float] | None = None,
        never_pays: str = "",
    ) -> None:
        self.stock, self.rewritten, self.session = stock, rewritten, session
        self.steps = {STOCK: stock, REWRITTEN: rewritten, **(more_steps or {})}
        self.options, self.report = options, report
        self.inputs = inputs or Inputs()
        self.rows: int | None = None  # of the largest batch that was seen, if that is known
        self._together = 1
        rewrites = [name for name in self.steps if name != STOCK]
        limited = options.memory_limit_bytes is not None
        self.comparison = StepComparison(
            options, report, rewrites, limited=limited, asked=options.compare is True
        )
        self._never_pays = never_pays
        self.predicted = not session.shows_ops  # ops have been measured, or will never be
        self._lock = threading.RLock()
        self._on_decided = on_decided
        self._samples_seen = samples_seen or (lambda: 0.0)
        budget = Budget(len(rewrites), why_not=never_pays)
        # With a limit stock may need too much; with ``strict`` a failure is to show in the first step.
        at_once = options.strict or not self.comparison.stock_may_stay
        waits = options.compare is None and options.profile_steps > 0 and not at_once
        self.experiment = Experiment(self._stock_first(budget) if waits else _Beginning(self))

    def _stock_first(self, budget: Budget) -> StockFirst:
        """Run stock steps until the rest of the fit is known to pay for a comparison."""
        return StockFirst(
            budget,
            self.report,
            functools.partial(self.run, STOCK),
            lambda: traces.trace_count(self.stock),
            lambda budget: fall_back(
                self.report, budget.why_not, expected=True, how_to_record="compare=True"
            ),
            lambda _: self.experiment.enter(_Beginning(self)),
        )

    def begin_fit(self, executions: int | None, together: int) -> None:
        """Take note of a fit's executions and of the steps in each; None: the number is not known."""
        self._together, phase = together, self.experiment.phase
        if isinstance(phase, StockFirst):
            ways, trace_s = phase.budget.ways, phase.budget.trace_s
            budget = Budget(ways, executions, together, trace_s, why_not=self._never_pays)
            self.experiment.enter(self._stock_first(budget))
            self.report.put(Outcome())

    @property
    def choice(self) -> str | None:
        """Return the step that is kept; None while that is open."""
        phase = self.experiment.phase
        return phase.which if isinstance(phase, KeptStep) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.options.memory_limit_bytes is not None:
            with self._lock:  # two steps at once would keep the sum of their peaks alive
                return self._with_limit((args, kwargs))
        if self.choice is not None:
            return self.experiment.run((args, kwargs))
        if not self._lock.acquire(blocking=False):
            # Another thread is timing a step.  Waiting for it could be a deadlock: steps may communicate.
            return self.run(STOCK if self.comparison.stock_may_stay else self._ours, (args, kwargs))
        try:
            return self.experiment.run((args, kwargs))
        finally:
            self._lock.release()

    @property
    def settled(self) -> bool:
        """Return whether one order is kept, and its ops have been measured if they are to be."""
        phase = self.experiment.phase
        return isinstance(phase, KeptStep) and phase.settled

    def _with_limit(self, call: Call) -> Any:
        """Run a step with a limit. Peaks are known once planned, so new inputs go to the rewritten step."""
        phase = self.experiment.phase
        args, seen = self.inputs.look(*call)
        call = args, call[1]
        if seen is not None:
            self.session.prepare(seen)
        if isinstance(phase, _Beginning) or (seen is None and self.choice is None):
            return self.experiment.run(call)
        mixing = self.choice is None or self.report.measured_step_s is not None
        plan_first = seen is not None and mixing and self.session.failures.first is None
        return self.run(self._ours if plan_first else self.choice, call)

    @property
    def _ours(self) -> str:
        """Return the rewritten step that is kept; before that the first one."""
        return self.comparison.times.first_rewrite if self.choice in (None, STOCK) else str(self.choice)

    def run(self, which: str | None, call: Call) -> Any:
        """Run one of the steps; None: the rewritten one."""
        args, kwargs = call
        if which == STOCK:
            return self.session.run_stock(functools.partial(self.stock, *args, **kwargs), self.choice)
        which = which or self._ours
        try:
            outputs = self._run_rewritten(which, call)
        except MemoryLimitError as error:
            following = self._leave_out(which, error)
            if following is None:
                raise
            if self.choice == which:
                self._keep_rewritten(f"{which} needs more than memory_limit_bytes", following)
            return self.run(following, call)
        self.session.ran(self.choice)
        return outputs

    def _run_rewritten(self, which: str, call: Call) -> Any:
        # Every call, not only the first: another input shape makes TensorFlow trace again.
        try:
            with self.session.tracing():
                outputs = self.steps[which](*call[0], **call[1])
        except Exception:
            self.session.failures.raise_refused()
            raise
        self._check(which)
        return outputs

    def _leave_out(self, which: str, error: BaseException) -> str | None:
        """Drop a rewritten step; return another that is still there, None where it was the last."""
        left = [name for name in self.steps if name not in (STOCK, which)]
        if not left:
            return None
        del self.steps[which]
        self.comparison.times.drop(which)
        self.session.left_out(which, error)
        return left[0]

    def begin(self, call: Call) -> None:
        """Begin to compare, unless it is already known which step is kept."""
        never = self.options.may_fall_back and self.options.compare is False
        self.experiment.enter(Comparing(self.experiment, self.comparison, self._take_turn, self._decide))
        if never and self.comparison.stock_may_stay:
            self._keep_stock("compare=False")
        else:
            self._trace(*call)

    def _take_turn(self, which: str, call: Call) -> Turn:
        step, seen = self.steps[which], self._samples_seen()
        run, wait = functools.partial(self.run, which, call), bool(self.options.profile_steps)
        outputs, seconds, traced = timed_run(run, lambda: traces.trace_count(step), wait)
        samples = self._samples_seen() - seen
        rows = round(samples / self._together)
        if rows > 1:  # a train_step that updates the loss' metric with a mean counts one for each step
            self.rows = max(self.rows or 0, rows)
        return Turn(outputs, seconds, traced, kind=(nests.shapes_of(call), samples))

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace both now, so that changes that callbacks make in Python after the first step affect neither.

        Only one of the two runs from now on if the step draws from random state held by an op.
        """
        if not self.options.profile_steps and not self.comparison.stock_may_stay:
            return  # the rewritten step runs in any case
        late, stock_may_stay = traces.trace_count(self.stock) > 0, self.comparison.stock_may_stay
        draws = traces.random_state(self.stock) or self._trace_ours(args, kwargs)
        if draws and stock_may_stay:
            self._keep_stock(f"{draws}, {traces.NOT_SHARED}")
        elif draws:
            self._keep_rewritten(f"{draws}, which this step begins anew; no turns with the stock step")
        elif late and stock_may_stay and traces.differ(self.stock, self.rewritten, args, kwargs):
            self._keep_stock(_CHANGED)
        elif self.options.profile_steps:
            traces.trace(self.stock, args, kwargs)

    def _trace_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Trace the rewritten step; return the reason if one of its ops draws from a state of its own."""
        started = time.perf_counter()
        with self.session.tracing():
            traces.trace(self.rewritten, args, kwargs)
        self.report.took(time.perf_counter() - started)
        return traces.random_state(self.rewritten)

    def _check(self, which: str) -> None:
        """Take note of new plans and failures of a rewritten step that has just run."""
        for name, error in self.session.failed():
            # ``strict`` allows no errors of the graph.
            refused = self.options.strict and name == REWRITTEN and isinstance(error, GraphError)
            if name in self.steps and (self._leave_out(name, error) is None or refused):
                self.session.give_up()
        result, limit_bytes = self.session.result, self.options.memory_limit_bytes
        fill_plan(self.report, result)
        if (reason := self.session.failure()) is not None:
            if self.choice != STOCK:
                unchecked = "" if limit_bytes is None else "; memory_limit_bytes is not checked"
                self._keep_stock(f"{reason}{unchecked}")
            self.session.failures.raise_first(self.options.strict)
            if self.options.strict:
                raise GraphError(reason)
        elif limit_bytes is not None:
            peak = self.session.stock_peak_bytes
            self.report.change(stock_predicted_peak_bytes=peak)
            if peak > limit_bytes and self.choice in (None, STOCK):
                above = f"{peak} bytes, is above the limit, {limit_bytes} bytes"
                ours = which if which in self.steps else self._ours
                self._keep_rewritten(f"the stock order's predicted peak, {above}", ours)

    def _decide(self, verdict: Verdict) -> None:
        if verdict.why_not:
            self._keep_stock(verdict.why_not)
        else:
            self._keep_rewritten(which=verdict.which)

    def _keep_rewritten(self, because: str = "", which: str | None = None) -> None:
        which = which or self._ours
        self.session.keeps(which)
        self.experiment.enter(KeptStep(self, which))
        self.comparison.keep_rewritten(because)
        _LOG.info("keeping the rewritten step: %s", self.report.one_line())
        self._decided()

    def _keep_stock(self, reason: str) -> None:
        reason = self.session.why_stock(reason, self.steps.keys())
        self.experiment.enter(KeptStep(self, STOCK))
        # The plug-in has logged its first error already.
        fall_back(self.report, reason, logged=self.session.failures.first is not None)
        self._decided()

    def _decided(self) -> None:
        self.session.decided()
        self.session.ran(self.choice)
        if self._on_decided is not None:
            self._on_decided()


class _Beginning(Training):
    """Represents the first execution of a comparison, in which functions are traced."""

    def __init__(self, controller: StepController) -> None:
        self._controller = controller

    def run(self, given: Call) -> Any:
        self._controller.begin(given)
        return self._controller.experiment.run(given)


class KeptStep(Training):
    """Runs the step that is kept; its first execution after a comparison is profiled, op by op."""

    def __init__(self, controller: StepController, which: str) -> None:
        self.which, self._controller = which, controller

    @property
    def settled(self) -> bool:
        """Return whether ops have been measured, if they are to be."""
        controller = self._controller
        failed = controller.session.failures.first is not None
        return failed or controller.predicted or controller.report.measured_step_s is None

    def run(self, given: Call) -> Any:
        controller = self._controller
        step = functools.partial(controller.run, self.which, given)
        if self.settled:
            return step()
        controller.predicted = True
        return run_predicting(step, controller.report, controller.session.result)


def run_predicting(step: Callable[[], Any], report: Report, result: RewriteResult | None) -> Any:
    """Run a step with the profiler; the report gets the step time predicted from the seconds of its ops.

    Where TensorFlow runs ops side by side the step takes less.  A failure here becomes a note in the report.
    """

    def not_known(error: OOOError) -> None:
        _LOG.debug("no prediction: %s", error)
        kind = "" if isinstance(error, BackendError) else "costs are not known: "
        report.note(f"{NOT_PREDICTED}{kind}{error}")

    profiler = StepProfiler(1)
    outputs = profiler.run_anyway(step, not_known)
    if profiler.profile is None or result is None:
        return outputs
    report.took(profiler.profile.overhead_s)
    try:
        costs = step_costs(result.graph_def, result.training_graph, profiler.profile)
    except OOOError as error:
        not_known(error)
        return outputs
    seconds: defaultdict[Task, float] = defaultdict(float)
    for name, task in tasks_of_ops(result.training_graph).items():
        seconds[task] += costs.op_seconds.get(name, 0.0)
    timeline, predicted_s = one_by_one(result.schedule, seconds), sum(costs.op_seconds.values())
    report.change(costs=costs, timeline=timeline, predicted_step_s=predicted_s)
    report.note(*costs.notes)
    return outputs
