"""Runs unrolled steps in the stock order and in a planned one; all ranks switch together."""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tf_ooo.compat import train_function
from tf_ooo.errors import GraphError
from tf_ooo.fit.comparison import STOCK, StepComparison, Verdict
from tf_ooo.fit.mode import Comparing, Experiment, Kept, StockFirst, Turn
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.timing import Baseline, Budget, timed_run, undone_steps_s
from tf_ooo.modes.data_parallel import planning
from tf_ooo.modes.data_parallel.compiled import CompiledSteps
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.ordering import order_steps, request_to_order
from tf_ooo.modes.data_parallel.planning import ALONE, note_alone
from tf_ooo.modes.data_parallel.profiling import (
    OrderedSteps,
    Planned,
    Profiling,
    RankFunctions,
    RewrittenSteps,
    Single,
)
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.parts import Outcome, fall_back
from tf_ooo.report.report import Report
from tf_ooo.rewriting.lowering import tasks_of_ops
from tf_ooo.tracing import traces
from tf_ooo.tracing.flat import steps_together

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep

_LOG = logging.getLogger("tf_ooo")
_SINGLE = "single"
# The ordered steps and a single one, which is profiled, are traced. The first trace takes up to 1.4 times as
# long as the stock order's, as it is also rewritten; the second less than half of it.
_TRACES = 2
# One step at a time is taken if it is faster by more than this: its times are few.
_CLEARLY = 0.98
Batches = Sequence[Any]


class ScheduledSteps:
    """Stands in the place of a function of an execution's batches.

    All ranks enter each phase at the same execution.  An error on one rank keeps all of them in the stock
    order.

    ``options``: ``schedule`` and its own, ``unroll``, ``profile_steps``, ``strict``, ``dump_dir``.
    ``compiles``: whether XLA is to compile the tasks of ordered steps.
    """

    def __init__(
        self, ranks: RanksInStep, options: DataParallel, report: Report, compiles: bool = False
    ) -> None:
        self.ranks, self.options, self.report, self.compiles = ranks, options, report, compiles
        self.functions = functions = RankFunctions(ranks)
        self.steps = self.steps_of(ranks.lockstep.of_epoch)  # of one function
        self.stock = functions.unrolled(functions.source, self.steps)
        self.comparison = StepComparison(options, report, ranks=ranks.engine)
        self._stock_predicted_s: float | None = None
        self._alone_is_next = False  # it has just been decided what runs from now on
        # With ``strict`` a failure is to show in the first steps.
        asked = options.compare is True or options.strict or not options.may_fall_back
        waits = options.profile_steps > 0 and not asked
        self.experiment = Experiment(self._stock_first() if waits else self._profiling())

    def _stock_first(self, trace_s: float = 0.0) -> StockFirst:
        """Return the stock phase of one fit, which ends on all ranks after the same execution.

        ``trace_s``: seconds of tracing them in an earlier fit on the slowest rank; 0: not traced.
        """
        ranks, together = self.ranks, self._of_execution(self.ranks.lockstep.of_epoch)
        budget = Budget(_TRACES, ranks.executions_of_fit(), together, trace_s, steps=ranks.steps_of_fit())
        gradient_bytes = sum(4 * math.prod(w.shape) for w in ranks.model.trainable_weights)

        def slowest(seconds: float, traced: bool) -> tuple[float, bool]:
            everyone = ranks.engine.gather((seconds, traced))
            seconds, traced = max(theirs_s for theirs_s, _ in everyone), any(each for _, each in everyone)
            budget.beside_s = planning.most_seconds(seconds / together, gradient_bytes)
            return seconds, traced

        return StockFirst(
            budget,
            self.report,
            self.stock,
            lambda: self.stock.traced,
            self._keep_unplanned,
            self._begin_to_profile,
            comparable=lambda batches: len(batches) >= together,  # a short one tells nothing about the others
            slowest=slowest,
        )

    def _profiling(self) -> Profiling:
        return Profiling(self.functions, self.options, self.report, self.steps, self.take)

    def begin_fit(self, ranks: RanksInStep) -> None:
        """Begin a further fit of the same model; whether it pays for a comparison is decided anew."""
        self.ranks, phase = ranks, self.experiment.phase
        if isinstance(phase, StockFirst):
            self.experiment.enter(self._stock_first(phase.budget.trace_s))
            self.report.put(Outcome())
        elif isinstance(phase, InTurns | KeptSteps) and phase.ordered is not None:
            phase.ordered.compile(ranks.batch)

    def steps_of(self, of_epoch: int | None) -> int:
        """Return the number of steps in one function if an epoch has so many."""
        most = self.options.unroll or self.functions.source.most
        return steps_together(self._of_execution(of_epoch), most)

    def _of_execution(self, of_epoch: int | None) -> int:
        """Return the steps of the longest executions."""
        steps = train_function.steps_per_execution(self.functions.model)
        return min(steps, of_epoch or steps)

    def __call__(self, batches: Batches) -> Any:
        """Train on the batches of one execution; return the logs of the last step."""
        if self._alone_is_next and len(batches) >= self.steps:
            self._alone_is_next = False
            self._compare_with_alone(list(batches[: self.steps]))
        return self.experiment.run(batches)

    def watched(self) -> Watched | None:
        """Return what a profile shows once comparisons are over; of several steps together the last."""
        return None if self._alone_is_next else self.experiment.phase.watched()

    def close(self) -> None:
        """End a running profile; the next fit profiles anew."""
        self.experiment.phase.restore()

    # -- from phase to phase -----------------------------------------------------------------------

    def _keep_unplanned(self, budget: Budget) -> None:
        fall_back(self.report, budget.why_not, expected=True, how_to_record="compare=True")
        self._alone_is_next = bool(budget.steps_s)

    def _begin_to_profile(self, budget: Budget) -> None:
        self.report.change(how_to_record="")
        if draws := self.draws_from_own_state(self.steps):
            self.keep_stock(draws)
        else:
            self.experiment.enter(self._profiling())

    def take(self, plan: Planned, single: Single) -> None:
        """Take turns with the stock order from now on; without turns, run the plan if it should gain."""
        report, options = self.report, self.options
        if plan.failed:
            self.cannot_order(f"no plan: {plan.failed}")
            return
        report.change(predicted_step_s=plan.step_s)
        report.note(*plan.notes)
        self._stock_predicted_s = plan.stock_s
        schedule = Schedule.from_text(plan.schedule)
        if plan.step_s is not None:
            gain = planning.predicted_gain(plan.step_s, plan.stock_s)
            _LOG.info("planned %s, predicted gain %.1f%%", schedule.policy, 100 * gain)
            if options.may_fall_back and not options.profile_steps and gain < planning.TRIED:
                self.keep_stock(f"no gain is predicted ({gain:.1%})", quiet=True)
                report.change(how_to_record=f"schedule={schedule.policy!r}")
                return
        self.experiment.enter(InTurns(self, self._ordered_steps(plan, schedule), single))

    def _ordered_steps(self, plan: Planned, schedule: Schedule) -> OrderedSteps:
        functions, engine = self.functions, self.functions.engine
        dump_dir = self.options.dump_dir if engine.rank == 0 else None  # ranks may share the folder
        source = functions.sliced(plan.slices) if plan.slices else functions.source
        order = (lambda graph: schedule), plan.flight_bytes, plan.layers, dump_dir, self.compiles
        rewritten = RewrittenSteps(
            functions, source, self.steps, lambda: request_to_order(functions.model, *order)
        )
        ordered = OrderedSteps(rewritten, engine, self.report)
        if self.compiles:
            ordered.compiled = CompiledSteps(
                source, lambda graph_def: order_steps(graph_def, *order), engine, self.report
            )
        return ordered

    def decide(self, verdict: Verdict, ordered: OrderedSteps, single: Single) -> None:
        """Keep the step that the ranks have found fastest."""
        self._alone_is_next = True
        if verdict.why_not:
            self.keep_stock(verdict.why_not, ordered)
        else:
            self.comparison.keep_rewritten()
            in_order = functools.partial(self._in_order, ordered)
            self.experiment.enter(KeptSteps(in_order, ordered, self.report))
        together_s, single_s = (verdict.seconds.get(which) for which in (verdict.which, _SINGLE))
        if not (self.options.may_fall_back and together_s and single_s):
            return
        # One step at a time again, if each of its steps was faster than all of those together.
        single_ms, together_ms = max(single_s) * 1e3, min(together_s) * 1e3
        if single_ms < _CLEARLY * together_ms:
            why = f"one step at a time took {single_ms:.2f} ms, several together {together_ms:.2f} ms"
            self.keep_stock(why, ordered, single.steps)

    def cannot_order(self, failed: str, ordered: OrderedSteps | None = None) -> None:
        """Keep the stock order.  GraphError if that is not allowed."""
        self.keep_stock(failed, ordered)
        if self.options.strict:
            raise GraphError(failed)

    def draws_from_own_state(self, count: int) -> str:
        """Say which op keeps random state to itself, if that forbids alternating between functions."""
        if not self.options.may_fall_back:
            return ""
        draws = traces.random_state(self.stock.function(self.steps if count >= self.steps else 1))
        return f"{draws}; name a schedule" if draws else ""

    def _in_order(self, ordered: OrderedSteps, batches: Batches) -> Any:
        traced = ordered.steps.traced
        outputs = ordered.steps(batches)
        if ordered.steps.traced > traced:
            self.compare_order(ordered)
        return outputs

    def compare_order(self, ordered: OrderedSteps) -> None:
        """Compare after a trace the graphs of all ranks; all go back to stock if they differ.

        If they are alike, XLA may compile them.
        """
        if apart := ordered.why_apart():
            self.cannot_order(apart, ordered)
        else:
            ordered.compile(self.ranks.batch)

    def keep_stock(
        self,
        reason: str,
        ordered: OrderedSteps | None = None,
        steps: Callable[[Batches], Any] | None = None,
        quiet: bool = False,
    ) -> None:
        fall_back(self.report, reason, logged=quiet)
        self.report.change(predicted_step_s=self._stock_predicted_s or self.report.predicted_step_s)
        if ordered is not None:
            ordered.rewritten.close()
        self.experiment.enter(KeptSteps(steps or self.stock, ordered, self.report))

    # -- beside the fit ----------------------------------------------------------------------------

    def _compare_with_alone(self, batches: list[Any]) -> None:
        """Measure this rank's steps without communication; the steps are undone."""
        report, count, asked = self.report, len(batches), self.options.compare
        if report.alone_s or not report.running_s:
            return

        def run(least: int) -> list[float]:
            concrete = self.functions.alone().function(count).get_concrete_function(batches)
            return [seconds / count for seconds in undone_steps_s(concrete, batches, least, asked is True)]

        baseline = Baseline(ALONE, report, asked, self.ranks.steps_of_fit(), always=True)
        alone_s = baseline.measured(run, statistics.median(report.running_s), self.stock.first_s, count)
        note_alone(report, alone_s, self.ranks, count)


class InTurns(Comparing):
    """Has the stock order and a planned one take turns."""

    def __init__(self, scheduled: ScheduledSteps, ordered: OrderedSteps, single: Single) -> None:
        super().__init__(
            scheduled.experiment,
            scheduled.comparison,
            self._take_turn,
            lambda verdict: scheduled.decide(verdict, ordered, single),
            {_SINGLE: single.seconds},
        )
        self.ordered, self._scheduled = ordered, scheduled

    def _take_turn(self, which: str, batches: Batches) -> Turn:
        scheduled, count = self._scheduled, len(batches)
        steps = scheduled.stock if which == STOCK else self.ordered.steps
        before = steps.traced
        outputs, seconds, first = timed_run(lambda: steps(batches), lambda: steps.first_runs)
        traced = steps.traced > before
        if traced and which != STOCK:
            scheduled.compare_order(self.ordered)
        elif traced and (draws := scheduled.draws_from_own_state(count)):
            scheduled.keep_stock(draws, self.ordered)
        return Turn(outputs, seconds / count, first, count, count, comparable=count >= scheduled.steps)


class KeptSteps(Kept):
    """Runs the kept steps from now on; ``ordered``: those they were compared with, if any."""

    def __init__(self, steps: Callable[[Batches], Any], ordered: OrderedSteps | None, report: Report) -> None:
        super().__init__(steps)
        self.ordered, self._report = ordered, report

    def watched(self) -> Watched | None:
        result = None if self.ordered is None else self.ordered.rewritten.result
        if result is None:
            return None
        why = "the stock order was kept" if self._report.fell_back else ""
        return Watched(result.schedule, functools.partial(tasks_of_ops, result.training_graph), why=why)
