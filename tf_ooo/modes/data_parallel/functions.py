"""The functions in which ranks run a model's step: in the stock order, or rewritten on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from tf_ooo.errors import OOOError
from tf_ooo.fit import progress
from tf_ooo.hosts.ranks.base import Engine
from tf_ooo.hosts.ranks.messages import Message
from tf_ooo.modes.data_parallel.ordering import digest
from tf_ooo.report.report import Report
from tf_ooo.rewriting.reporting import fill_plan
from tf_ooo.rewriting.request import ResultT, RewriteRequest
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.tracing.unrolled import StepSource, Unrolled, Wrapper

if TYPE_CHECKING:
    from tf_ooo.modes.data_parallel.ranks import RanksInStep


class RankFunctions:
    """Makes functions of a model's step, which averages its gradients over all ranks.

    Attributes:
        source: the step as the model has it.
    """

    def __init__(self, ranks: RanksInStep) -> None:
        self.model, self.engine, self.element_spec = ranks.model, ranks.engine, ranks.element_spec
        self.averaging = ranks.averaging
        self.source = self._source_with(self.averaging.wrap(self.model))

    def sliced(self, slices: Mapping[str, int]) -> StepSource:
        """Return the step traced anew, with gradients that travel in slices."""
        wrap, cut = self.averaging.wrap(self.model), self.averaging.slices.wrap
        return self._source_with(lambda train_step: cut(wrap(train_step), slices))

    def alone(self) -> StepSource:
        """Return the step of this rank, which tells the others nothing."""
        return self._source_with(lambda train_step: train_step)

    def _source_with(self, wrap: Wrapper) -> StepSource:
        return StepSource(self.model, wrap, self.element_spec, self.engine.renumber)

    def unrolled(
        self, source: StepSource, steps: int, tracing: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Unrolled:
        """Return so many steps in one function; rank 0 says when they are traced."""
        unrolled = Unrolled(source, steps, tracing)
        if self.engine.rank == 0:
            unrolled.around_traces = lambda count: progress.said(f"tracing {count} steps in one function")
        return unrolled


class RewrittenSteps(Generic[ResultT]):
    """Steps whose graphs a request rewrites; where no request can be made, ``failed`` says why."""

    def __init__(
        self,
        functions: RankFunctions,
        source: StepSource,
        steps: int,
        make_request: Callable[[], RewriteRequest[ResultT]],
    ) -> None:
        self.failed, self._request = "", None
        tracing: Callable[[], AbstractContextManager[Any]] = nullcontext
        try:
            self._request = make_request()
            tracing = self._request.tracing
        except OOOError as error:
            self.failed = str(error)
        self.steps = functions.unrolled(source, steps, tracing)

    @property
    def result(self) -> ResultT | None:
        """The largest graph's; None: no graph was rewritten."""
        return None if self._request is None else self._request.result

    @property
    def latest(self) -> ResultT | None:
        """The latest graph's; None: no graph was rewritten."""
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


class OrderedSteps:
    """Steps in a planned order, which all ranks run alike or none does."""

    def __init__(self, rewritten: RewrittenSteps[RewriteResult], engine: Engine, report: Report) -> None:
        self.rewritten, self.steps = rewritten, rewritten.steps
        self._engine, self._report = engine, report

    def why_apart(self) -> str:
        """Say after a trace why all ranks have to go back to the stock order; empty: they run the same."""
        latest = self.rewritten.latest
        mine = Ordered(self.rewritten.failure, "" if latest is None else digest(latest))
        told: list[Ordered] = mine.told(self._engine)
        self._fill_report()
        different = [rank for rank, reply in enumerate(told) if reply.digest != told[0].digest]
        failed = next((reply.failed for reply in told if reply.failed), "")
        if not failed and different:
            return f"rank {different[0]} has another graph than rank 0 ({len(different)} of {len(told)} have)"
        return failed

    def _fill_report(self) -> None:
        """Fill in the graph; what was planned and predicted for it stays."""
        report = self._report
        predicted_s, timeline, planned_s = report.predicted_step_s, report.timeline, report.plan_seconds
        fill_plan(report, self.rewritten.result)
        planned_s = (planned_s or 0.0) + (report.plan_seconds or 0.0)
        report.change(predicted_step_s=predicted_s, timeline=timeline, plan_seconds=planned_s)
