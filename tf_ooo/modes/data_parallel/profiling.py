"""Profiles single steps on all ranks; then rank 0 plans, and all adopt its plan."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from grappler_passes.passes.base import PassResult
from tf_ooo.costs.profile import MOST_STEPS, StepProfiler, step_costs
from tf_ooo.errors import GraphError, OOOError
from tf_ooo.fit import timing
from tf_ooo.fit.mode import Training
from tf_ooo.fit.timing import timed_run
from tf_ooo.hosts.ranks.base import Engine, Message
from tf_ooo.modes.data_parallel import planning
from tf_ooo.modes.data_parallel.compiled import CompiledSteps
from tf_ooo.modes.data_parallel.options import DataParallel
from tf_ooo.modes.data_parallel.ordering import FLIGHT_BYTES, LayerKey, digest, request_to_look
from tf_ooo.report.report import Report
from tf_ooo.rewriting.request import ResultT, RewriteRequest
from tf_ooo.rewriting.result import RewriteResult, fill_plan
from tf_ooo.tracing.flat import StepSource, Unrolled, Wrapper
from tf_ooo.tracing.intercepting import counts_for

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep


class RankFunctions:
    """Makes functions of a model's step, which averages its gradients over all ranks.

    Attributes:
        source: the model's own step.
    """

    def __init__(self, ranks: RanksInStep) -> None:
        self.model, self.engine, self.element_spec = ranks.model, ranks.engine, ranks.element_spec
        self.averaging = ranks.averaging
        self.source = self._source_with(self.averaging.wrap(self.model))

    def sliced(self, slices: Mapping[str, int]) -> StepSource:
        """Return the step traced anew, with gradients sent in slices."""
        wrap, cut = self.averaging.wrap(self.model), self.averaging.slices.wrap
        return self._source_with(lambda train_step: cut(wrap(train_step), slices))

    def alone(self) -> StepSource:
        """Return this rank's step without communication."""
        return self._source_with(lambda train_step: train_step)

    def _source_with(self, wrap: Wrapper) -> StepSource:
        return StepSource(self.model, wrap, self.element_spec, self.engine.renumber)

    def unrolled(
        self, source: StepSource, steps: int, tracing: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Unrolled:
        """Return so many steps in one function; rank 0 says on stderr when they are traced."""
        unrolled = Unrolled(source, steps, tracing)
        if self.engine.rank == 0:
            unrolled.around_traces = lambda count: timing.said(f"tracing {count} steps in one function")
        return unrolled


class RewrittenSteps(Generic[ResultT]):
    """Holds steps whose graphs a request rewrites; if no request can be made, ``failed`` says why."""

    def __init__(
        self,
        functions: RankFunctions,
        source: StepSource,
        steps: int,
        make_request: Callable[[], RewriteRequest[ResultT]],
    ) -> None:
        self.failed, self._request = "", None
        try:
            self._request = make_request()
        except OOOError as error:
            self.failed = str(error)
        tracing = nullcontext if self._request is None else self._request.tracing
        self.steps = functions.unrolled(source, steps, tracing)

    @property
    def result(self) -> ResultT | None:
        """Return the result of the largest graph; None: no graph was rewritten."""
        return None if self._request is None else self._request.result

    @property
    def latest(self) -> ResultT | None:
        """Return the result of the latest graph; None: no graph was rewritten."""
        return None if self._request is None else self._request.latest

    @property
    def failure(self) -> str:
        """Say why some graph was not rewritten; empty: all were."""
        return self.failed or (self._request and self._request.failure()) or ""

    def close(self) -> None:
        if self._request is not None:
            self._request.close()


@dataclass(frozen=True)
class Ordered(Message):
    """Tells what a rank has traced, or why it cannot go on; see :func:`digest`."""

    failed: str = ""
    digest: str = ""
    compiles: bool = False


class OrderedSteps:
    """Holds steps in a planned order, which either all ranks run or none does.

    ``compiled``: the functions that XLA compiles; None: none are to be.
    """

    def __init__(self, rewritten: RewrittenSteps[RewriteResult], engine: Engine, report: Report) -> None:
        self.rewritten, self.steps = rewritten, rewritten.steps
        self.compiled: CompiledSteps | None = None
        self._engine, self._report = engine, report
        self.steps.traced_now = self._traced_now

    def _traced_now(self, count: int) -> None:
        if self.compiled is not None and self.rewritten.latest is not None:
            self.compiled.traced[count] = self.rewritten.latest

    def why_apart(self) -> str:
        """Say after a trace why all ranks have to go back to the stock order; empty: they run the same."""
        latest = self.rewritten.latest
        mine = Ordered(
            self.rewritten.failure, "" if latest is None else digest(latest), self.compiled is not None
        )
        told: list[Ordered] = mine.told(self._engine)
        if not all(reply.compiles for reply in told):  # with "auto", where not all ranks have a GPU
            self.compiled = None
        self._fill_report()
        different = [rank for rank, reply in enumerate(told) if reply.digest != told[0].digest]
        failed = next((reply.failed for reply in told if reply.failed), "")
        if not failed and different:
            return f"rank {different[0]} has another graph than rank 0 ({len(different)} of {len(told)} have)"
        return failed

    def compile(self, batch: Any) -> None:
        """Have XLA compile the traced steps for batches like this one; all ranks call it together."""
        if self.compiled is not None and not self.compiled.compile(self.steps, batch):
            self.compiled = None

    def _fill_report(self) -> None:
        """Fill in the graph; the plan and its predictions stay."""
        report = self._report
        predicted_s, timeline, planned_s = report.predicted_step_s, report.timeline, report.plan_seconds
        fill_plan(report, self.rewritten.result)
        planned_s = (planned_s or 0.0) + (report.plan_seconds or 0.0)
        report.change(predicted_step_s=predicted_s, timeline=timeline, plan_seconds=planned_s)


# Steps that are only timed, after those that are profiled.
_TIMED_STEPS = 2


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
class Single:
    """Holds steps that run one at a time, and the seconds of those that were timed."""

    steps: Unrolled
    seconds: list[float] = field(default_factory=list)


class Profiling(Training):
    """Runs single steps: the first traces; for costs rank 0 profiles some, and some are timed.

    Args:
        together: the number of steps in the planned functions.
        take: called on all ranks with the plan, or with the reason for having none.
    """

    def __init__(
        self,
        functions: RankFunctions,
        options: DataParallel,
        report: Report,
        together: int,
        take: Callable[[Planned, Single], None],
    ) -> None:
        self._functions, self._engine, self._options = functions, functions.engine, options
        self._report, self._together, self._take = report, together, take
        self._needs_costs = planning.needs_costs(options.schedule, options.policy_options)
        look = functools.partial(request_to_look, functions.model)
        self._probe: RewrittenSteps[PassResult] = RewrittenSteps(functions, functions.source, 1, look)
        self._failed = self._probe.failed
        self.single = Single(self._probe.steps)
        self._profiler, self._profiled = StepProfiler(MOST_STEPS), 0

    def run(self, given: Sequence[Any]) -> Any:
        outputs = None
        for batch in given:
            outputs = self._profile_one(batch)
        if self._profiled >= (1 + MOST_STEPS + _TIMED_STEPS if self._needs_costs else 1):
            self._plan()
        return outputs

    def restore(self) -> Sequence[str]:
        """End a running profile; the next fit profiles anew."""
        self._profiler.close()
        if self._profiled <= 1 + MOST_STEPS:
            self._profiled = min(self._profiled, 1)
        return ()

    def _profile_one(self, batch: object) -> Any:
        steps = self.single.steps
        self._profiled += 1
        if self._profiled > 1 + MOST_STEPS and self._needs_costs:
            outputs, seconds, _ = timed_run(lambda: steps([batch]), lambda: steps.traced)
            self.single.seconds.append(seconds)
            return outputs
        if self._engine.rank != 0 or self._profiled == 1 or not self._needs_costs or self._failed:
            return steps([batch])
        return self._profiler.run_anyway(functools.partial(steps, [batch]), self._cannot_plan)

    def _cannot_plan(self, error: OOOError) -> None:
        self._failed = str(error)

    def _plan(self) -> None:
        """Have rank 0 plan; all ranks adopt its plan."""
        started, link, plan = time.perf_counter(), None, Planned()
        try:
            link = planning.measure_allreduce(self._engine) if self._needs_costs else None  # by all ranks
        except OOOError as error:
            self._cannot_plan(error)
        try:
            if self._engine.rank == 0 and not self._failed:
                plan = self._plan_on_rank_0(link)
        except Exception as error:  # the other ranks wait to be told
            self._failed = f"{type(error).__name__}: {error}"
        if self._failed:
            plan = Planned(failed=self._failed)
        told: list[Planned] = plan.told(self._engine)
        self._probe.close()
        planned_s, profile = time.perf_counter() - started, self._profiler.profile
        profiler_s = 0.0 if profile is None else profile.overhead_s
        self._report.change(plan_seconds=planned_s)
        self._report.took(planned_s + self.single.steps.first_s + profiler_s)
        self._take(next((reply for reply in told if reply.failed), told[0]), self.single)

    def _plan_on_rank_0(self, link: planning.MeasuredLink | None) -> Planned:
        probe, options, workers = self._probe, self._options, self._engine.size
        if probe.result is None:
            raise GraphError(f"the step was not profiled: {probe.failure}")
        keys, step, graph = planning.one_step(probe.result.graph_def)
        if link is None:
            schedule = planning.plain_schedule(len(keys), options.schedule, workers, options.policy_options)
            return Planned(schedule=schedule.to_text(), layers=keys)
        if self._profiler.profile is None:
            raise GraphError("the step was not profiled")
        costs = step_costs(step, graph, self._profiler.profile)
        single_s = statistics.median(self.single.seconds)
        layers, table = planning.as_measured(costs, graph, link.link, workers, single_s)
        of_steps = (self._together, link.flight_bytes, options.policy_options)
        gain = planning.make_plan(layers, table.link, workers, options.schedule, *of_steps)
        plan, sizes = gain.plan, self._functions.averaging.slices.sizes
        self._report.change(costs=table, timeline=plan.timeline)
        left_out = [row for row in plan.candidates if row.reason]
        return Planned(
            schedule=plan.schedule.to_text(),
            layers=keys,
            step_s=plan.step_s,
            stock_s=gain.stock_s,
            flight_bytes=link.flight_bytes,
            slices=counts_for(plan.schedule, graph, sizes),
            notes=[f"schedule {row.name} was not compared: {row.reason}" for row in left_out],
        )
