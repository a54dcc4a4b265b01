"""Unrolled steps in the stock order and in a planned one; all ranks change over together."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from grappler_passes.passes.base import PassResult
from tf_ooo.compat import nests, train_function
from tf_ooo.costs.op_seconds import step_costs
from tf_ooo.costs.profile import MOST_STEPS, StepProfiler
from tf_ooo.errors import GraphError, OOOError
from tf_ooo.fit import progress
from tf_ooo.fit.baseline import Baseline, undone_steps_s
from tf_ooo.fit.comparison import STOCK, StepComparison
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.reporting import fall_back
from tf_ooo.fit.stock_first import note_steps
from tf_ooo.hosts.ranks.messages import Message
from tf_ooo.modes.data_parallel import planned
from tf_ooo.modes.data_parallel.alone import ALONE, note_alone
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.ordering import (
    FLIGHT_BYTES,
    LayerKey,
    digest,
    request_to_look,
    request_to_order,
)
from tf_ooo.modes.data_parallel.stock_first import RanksStockFirst, may_wait
from tf_ooo.planning.model.schedule import Schedule
from tf_ooo.report.report import Report
from tf_ooo.rewriting.op_tasks import tasks_of_ops
from tf_ooo.rewriting.reporting import fill_plan
from tf_ooo.rewriting.request import RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.tracing import traces
from tf_ooo.tracing.slices import counts_for
from tf_ooo.tracing.unrolled import StepSource, Unrolled, Wrapper, steps_together

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep

_LOG = logging.getLogger("tf_ooo")
# Steps that are only timed, after those that are profiled.
_TIMED_STEPS = 2
_SINGLE = "single"
# One step at a time is taken if it is faster by more than this: its times are few.
_CLEARLY = 0.98


Request = TypeVar("Request", RewriteRequest[PassResult], RewriteRequest[RewriteResult])


@dataclass(frozen=True)
class Planned(Message):
    """Tells what rank 0 has planned, or why a rank cannot go on; ``schedule`` as text, for ``layers``."""

    failed: str = ""
    schedule: str = ""
    layers: Sequence[LayerKey] = ()
    step_s: float | None = None
    stock_s: float | None = None
    flight_bytes: float = FLIGHT_BYTES
    slices: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Ordered(Message):
    """Tells what a rank has traced, or why it cannot go on; see :func:`digest`."""

    failed: str = ""
    digest: str = ""


class ScheduledSteps:
    """Callable with the batches of an execution.

    Phases, each of which all ranks enter at the same execution: *stock first* (``"auto"``: until what is left
    of the fit is known to pay for the others), *profile* (one step at a time, costs
    measured; one execution of it where a schedule needs no costs), *compare* (stock and planned order in
    turns), *decided*.  Whatever goes wrong on one rank keeps all of them in the stock order.

    ``options``: ``schedule`` and its own, ``unroll``, ``profile_steps``, ``strict``, ``dump_dir``.
    """

    def __init__(self, ranks: RanksInStep, options: DataParallel, report: Report) -> None:
        self.model, self.engine, self.options, self.report = ranks.model, ranks.engine, options, report
        self.element_spec, self._averaging = ranks.element_spec, ranks.averaging
        self._source = self._source_with(self._averaging.wrap(self.model))
        self.steps = self.steps_of(ranks.lockstep.of_epoch)  # of one function
        self.stock = self._unrolled(self._source, self.steps)
        self.ordered: Unrolled | None = None
        self.request: RewriteRequest[RewriteResult] | None = None
        self._probe: RewriteRequest[PassResult] | None = None
        self._profiler = StepProfiler(MOST_STEPS)
        self._profiled = 0
        self._single_s: list[float] = []
        self._single: Unrolled | None = None
        self._plan_failed = ""
        self._stock_predicted_s: float | None = None
        self._comparison = StepComparison(options, report, ranks=self.engine)
        self.ranks = ranks
        self._settled = False  # what runs from now on is known
        self._needs_costs = planned.needs_costs(options.schedule, options.policy_options)
        self._first = RanksStockFirst(ranks, self.stock) if may_wait(options) else None
        self._phase: Callable[[Sequence[Any]], Any] = self._run_first if self._first else self._profile

    def begin_fit(self, ranks: RanksInStep) -> None:
        """Begin a further fit of the same model: whether that one pays for a comparison is asked anew."""
        self.ranks = ranks
        if self._first is None:
            return
        self._first = RanksStockFirst(ranks, self.stock, self._first.known.trace_s)
        self._phase = self._run_first
        self.report.fell_back, self.report.fallback_reason = False, ""

    def steps_of(self, of_epoch: int | None) -> int:
        """Return how many steps go into one function where an epoch has so many."""
        most = self.options.unroll or self._source.most
        of_execution = train_function.steps_per_execution(self.model)
        return steps_together(min(of_execution, of_epoch or of_execution), most)

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Trains on the batches of one execution; the logs of the last step."""
        if self._settled and len(batches) >= self.steps:
            self._settled = False
            self._compare_with_alone(list(batches[: self.steps]))
        return self._phase(batches)

    def watched(self) -> Watched | None:
        """Once the comparisons are through; of several steps in one function the last."""
        request, report = self.request, self.report
        result = None if request is None else request.result
        comparing = (self._run_first, self._profile, self._compare)
        phase = getattr(self._phase, "func", self._phase)
        if result is None or self._settled or phase in comparing:
            return None
        why = "the stock order was kept" if report.fell_back else ""
        return Watched(result.schedule, functools.partial(tasks_of_ops, result.training_graph), why=why)

    def close(self) -> None:
        """Ends a profile under way; the next fit profiles anew."""
        self._profiler.close()
        if self._profiled <= 1 + MOST_STEPS:
            self._profiled = min(self._profiled, 1)

    # -- stock first -----------------------------------------------------------------------------

    def _run_first(self, batches: Sequence[Any]) -> Any:
        """Return several steps together in the stock order."""
        first, report = self._first, self.report
        if first is None or first.known.why_not:
            return self.stock(batches)
        outputs, known = first.run(batches, self._timed), first.known
        note_steps(report, known)
        report.undecided = "" if known.why_not else known.waits
        if known.why_not:
            fall_back(report, known.why_not, expected=True)
            report.how_to_record, self._settled = "compare=True", bool(known.steps_s)
        elif known.begins:
            self._first, self._phase, report.how_to_record = None, self._profile, ""
            self._draws_from_own_state(len(batches))
        return outputs

    # -- profile ---------------------------------------------------------------------------------

    def _profile(self, batches: Sequence[Any]) -> Any:
        """Step by step: one that traces; for costs some with the profiler on rank 0, some that are timed."""
        outputs = None
        for batch in batches:
            outputs = self._profile_one(batch)
        if self._profiled >= (1 + MOST_STEPS + _TIMED_STEPS if self._needs_costs else 1):
            self._make_plan()
        return outputs

    def _profile_one(self, batch: object) -> Any:
        if self._single is None:
            self._probe, self._single = self._rewritten(self._source, 1, lambda: request_to_look(self.model))
        self._profiled += 1
        if self._profiled > 1 + MOST_STEPS and self._needs_costs:
            outputs, each_s, _ = self._timed(self._single, [batch])
            self._single_s.append(each_s)
            return outputs
        if self.engine.rank != 0 or self._profiled == 1 or not self._needs_costs or self._plan_failed:
            return self._single([batch])
        return self._profiler.run_anyway(functools.partial(self._single, [batch]), self._cannot_plan)

    def _cannot_plan(self, error: OOOError) -> None:
        self._plan_failed = str(error)

    def _rewritten(
        self, source: StepSource, steps: int, make_request: Callable[[], Request]
    ) -> tuple[Request | None, Unrolled]:
        """Return steps whose graphs come to a request, unless there can be none."""
        try:
            request = make_request()
        except OOOError as error:
            self._cannot_plan(error)
            return None, self._unrolled(source, steps)
        return request, self._unrolled(source, steps, request.tracing)

    def _unrolled(
        self, source: StepSource, steps: int, tracing: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Unrolled:
        """Says on rank 0 that steps are traced."""
        unrolled = Unrolled(source, steps, tracing)
        if self.engine.rank == 0:
            unrolled.around_traces = lambda count: progress.said(f"tracing {count} steps in one function")
        return unrolled

    def _timed(self, steps: Unrolled, batches: Sequence[Any]) -> tuple[Any, float, bool]:
        """Return the logs, seconds of each step, and whether something was traced meanwhile."""
        before, started = steps.traced, time.perf_counter()
        outputs = steps(batches)
        nests.synchronize(outputs)
        return outputs, (time.perf_counter() - started) / len(batches), steps.traced > before

    def _make_plan(self) -> None:
        """Rank 0 plans; all ranks take what it says."""
        started, link, plan = time.perf_counter(), None, Planned()
        try:
            link = planned.measure_allreduce(self.engine) if self._needs_costs else None  # by all ranks
        except OOOError as error:
            self._cannot_plan(error)
        try:
            if self.engine.rank == 0 and not self._plan_failed:
                plan = self._plan_on_rank_0(link)
        except Exception as error:  # the other ranks wait to be told
            self._plan_failed = f"{type(error).__name__}: {error}"
        if self._plan_failed:
            plan = Planned(failed=self._plan_failed)
        said: list[Planned] = plan.told(self.engine)
        if self._probe is not None:
            self._probe.close()
        self.report.plan_seconds = time.perf_counter() - started
        self.report.profiling_overhead_s += self.report.plan_seconds + self._profile_s()
        failed = _first_failure(said)
        if failed:
            self._cannot_order(f"no plan: {failed}")
            return
        self._take(said[0])

    def _profile_s(self) -> float:
        """Return seconds of tracing the single step, and of the profiler."""
        traced_s = 0.0 if self._single is None else self._single.first_s
        profile = self._profiler.profile
        return traced_s + (0.0 if profile is None else profile.overhead_s)

    def _plan_on_rank_0(self, link: planned.MeasuredLink | None) -> Planned:
        probe, options, workers = self._probe, self.options, self.engine.size
        if probe is None or probe.result is None:
            why = "" if probe is None else f": {probe.failure()}"
            raise GraphError(f"the step was not profiled{why}")
        keys, step, graph = planned.one_step(probe.result.graph_def)
        if link is None:
            schedule = planned.plain_schedule(len(keys), options.schedule, workers, options.policy_options)
            return Planned(schedule=schedule.to_text(), layers=keys)
        if self._profiler.profile is None:
            raise GraphError("the step was not profiled")
        costs = step_costs(step, graph, self._profiler.profile)
        single_s = statistics.median(self._single_s)
        layers, table = planned.as_measured(costs, graph, link.link, workers, single_s)
        self.report.costs, between = table, table.link
        gain = planned.make_plan(
            layers, between, workers, options.schedule, self.steps, link.flight_bytes, options.policy_options
        )
        plan = gain.plan
        self.report.timeline = plan.timeline
        return Planned(
            schedule=plan.schedule.to_text(),
            layers=keys,
            step_s=plan.step_s,
            stock_s=gain.stock_s,
            flight_bytes=link.flight_bytes,
            slices=counts_for(plan.schedule, graph, self._averaging.slices.sizes),
            notes=[
                f"schedule {row.name} was not compared: {row.reason}" for row in plan.candidates if row.reason
            ],
        )

    def _take(self, plan: Planned) -> None:
        """Take turns with the stock order from now on; where none are taken, only if a gain is predicted."""
        self.report.predicted_step_s, self._stock_predicted_s = plan.step_s, plan.stock_s
        self.report.notes += [note for note in plan.notes if note not in self.report.notes]
        schedule = Schedule.from_text(plan.schedule)
        if plan.step_s is not None:
            gain = planned.predicted_gain(plan.step_s, plan.stock_s)
            _LOG.info("planned %s, predicted gain %.1f%%", schedule.policy, 100 * gain)
            if self.options.may_fall_back and not self.options.profile_steps and gain < planned.TRIED:
                self._keep_stock(f"no gain is predicted ({gain:.1%})", quiet=True)
                self.report.how_to_record = f"schedule={schedule.policy!r}"
                return
        source = self._sliced_source(plan.slices) if plan.slices else self._source
        dump_dir = self.options.dump_dir if self.engine.rank == 0 else None  # ranks may share the folder
        self.request, ordered = self._rewritten(
            source,
            self.steps,
            lambda: request_to_order(
                self.model, lambda graph: schedule, plan.flight_bytes, plan.layers, dump_dir
            ),
        )
        self.ordered, self._phase = ordered, functools.partial(self._compare, ordered)

    def _sliced_source(self, slices: Mapping[str, int]) -> StepSource:
        """Return the step traced anew, with gradients that travel in slices."""
        wrap, cut = self._averaging.wrap(self.model), self._averaging.slices.wrap
        return self._source_with(lambda train_step: cut(wrap(train_step), slices))

    def _source_with(self, wrap: Wrapper) -> StepSource:
        return StepSource(self.model, wrap, self.element_spec, self.engine.renumber)

    # -- compare ---------------------------------------------------------------------------------

    def _compare(self, ordered: Unrolled, batches: Sequence[Any]) -> Any:
        which = self._comparison.times.next
        steps = self.stock if which == STOCK else ordered
        outputs, each_s, traced = self._timed(steps, batches)
        if traced and steps is ordered:
            self.report.profiling_overhead_s += each_s * len(batches)
        if traced and steps is ordered and not self._agree():
            return outputs
        if traced and which == STOCK and self._draws_from_own_state(len(batches)):
            return outputs
        self._comparison.add(which, each_s, traced or len(batches) < self.steps, len(batches))
        self._decide(ordered)
        return outputs

    def _agree(self) -> bool:
        """Say after a trace whether all ranks run the same order. If not, all go back to the stock order."""
        request = self.request
        failed = self._plan_failed or (request.failure() or "" if request is not None else "")
        latest = None if request is None else request.latest
        said: list[Ordered] = Ordered(failed, "" if latest is None else digest(latest)).told(self.engine)
        failed = _first_failure(said)
        different = [rank for rank, reply in enumerate(said) if reply.digest != said[0].digest]
        if not failed and different:
            failed = (
                f"rank {different[0]} has another graph than rank 0 ({len(different)} of {len(said)} have)"
            )
        predicted_s, plan_seconds = self.report.predicted_step_s, self.report.plan_seconds
        timeline = self.report.timeline
        fill_plan(self.report, None if request is None else request.result)
        self.report.predicted_step_s, self.report.timeline = predicted_s, timeline
        self.report.plan_seconds = (plan_seconds or 0.0) + (self.report.plan_seconds or 0.0)
        if failed:
            self._cannot_order(failed)
        return not failed

    def _cannot_order(self, failed: str) -> None:
        self._keep_stock(failed)
        if self.options.strict:
            raise GraphError(failed)

    def _draws_from_own_state(self, count: int) -> bool:
        """Return an op that keeps random numbers to itself forbids going to and fro between two functions."""
        if not self.options.may_fall_back:
            return False
        steps = self.stock.function(self.steps if count >= self.steps else 1)
        draws = traces.random_state(steps)
        if draws:
            self._keep_stock(f"{draws}; name a schedule")
        return bool(draws)

    def _decide(self, ordered: Unrolled) -> None:
        """Once enough steps are timed: the same on all ranks."""
        verdict = self._comparison.verdict({_SINGLE: self._single_s})
        if verdict is None:
            return
        self._settled = True
        if verdict.why_not:
            self._keep_stock(verdict.why_not)
        else:
            self._comparison.keep_rewritten()
            self._phase = functools.partial(self._run_ordered, ordered)
        if self.options.may_fall_back and verdict.seconds:
            self._compare_with_single(verdict.seconds[verdict.which], verdict.seconds[_SINGLE])

    def _compare_with_single(self, together_s: Sequence[float], single_s: Sequence[float]) -> None:
        """One step at a time again, if each of its steps was faster than all of those together."""
        single = self._single
        if single is None or not single_s or not together_s:
            return
        single_ms, together_ms = max(single_s) * 1e3, min(together_s) * 1e3
        if single_ms < _CLEARLY * together_ms:
            self._keep_stock(
                f"one step at a time took {single_ms:.2f} ms, several together {together_ms:.2f} ms"
            )
            self._phase = single

    def _compare_with_alone(self, batches: list[Any]) -> None:
        """Measure this rank's steps without the others, whom it tells nothing; the steps are undone."""
        report, count = self.report, len(batches)
        if report.alone_s or not report.running_s:
            return
        source = self._source_with(lambda train_step: train_step)

        def run() -> list[float]:
            concrete = source.function(count).get_concrete_function(batches)
            return [seconds / count for seconds in undone_steps_s(concrete, batches)]

        baseline = Baseline(ALONE, report, self.options.compare, self.ranks.steps_of_fit())
        step_s = statistics.median(report.running_s)
        alone_s = baseline.measured(run, step_s, self.stock.first_s, count)
        note_alone(report, alone_s, self.ranks, count)

    # -- decided ---------------------------------------------------------------------------------

    def _run_ordered(self, ordered: Unrolled, batches: Sequence[Any]) -> Any:
        before = ordered.traced
        outputs = ordered(batches)
        if ordered.traced > before:
            self._agree()
        return outputs

    def _keep_stock(self, reason: str, quiet: bool = False) -> None:
        self._comparison.keep_stock(reason, logged=quiet)
        self.report.predicted_step_s = self._stock_predicted_s or self.report.predicted_step_s
        if self.request is not None:
            self.request.close()
        self.ordered = None
        self._phase = self.stock


def _first_failure(said: Sequence[Planned] | Sequence[Ordered]) -> str:
    """Say why some rank cannot go on; empty where all can."""
    return next((reply.failed for reply in said if reply.failed), "")
