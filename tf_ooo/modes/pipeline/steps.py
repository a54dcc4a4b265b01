"""Runs the steps of a fit, batch by batch; with a plan, variables are moved and steps are cut."""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from grappler_passes.blocks import collector_paused
from tf_ooo.compat import nests
from tf_ooo.compat.train_function import Kind, makes_its_own
from tf_ooo.costs.table import CostTable
from tf_ooo.errors import BackendError, OOOError
from tf_ooo.fit import timing
from tf_ooo.fit.distributed import Placed, Tracing, not_cut
from tf_ooo.fit.measured import InPlace, costs_of_calls
from tf_ooo.fit.mode import Experiment, Function, Training
from tf_ooo.fit.recorder import Watched
from tf_ooo.fit.timing import ONE_DEVICE
from tf_ooo.hosts.cluster import Cluster, gone
from tf_ooo.hosts.memory import in_host_memory
from tf_ooo.modes.pipeline import tasks_of
from tf_ooo.modes.pipeline.first_batch import FirstBatch
from tf_ooo.modes.pipeline.mesh import pieces_of
from tf_ooo.modes.pipeline.placed_step import Evaluation, OutputsFirst, PlacedStep, StagedEvaluation
from tf_ooo.modes.pipeline.plans import PipelinePlans, PlannedPipeline
from tf_ooo.modes.pipeline.reporting import why_back
from tf_ooo.planning.simulation.measured import repeated
from tf_ooo.report.parts import ENOUGH, Rewritten
from tf_ooo.rewriting.compiled_calls import call_seconds
from tf_ooo.rewriting.lowering import timed_ops
from tf_ooo.rewriting.request import in_one_line
from tf_ooo.rewriting.result import RewriteResult
from tf_ooo.rewriting.staged import TracedBefore
from tf_ooo.tracing.micro_batches import BatchesSeen, Division
from tf_ooo.tracing.step import StepFunctions
from tf_ooo.tracing.variables import all_variables, bytes_of

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger("tf_ooo")
_CALCULATED = "costs are calculated from shapes, not measured"
_LARGER = f"{_CALCULATED}: a larger batch came first"
_OP_BY_OP = "batches of other sizes run op by op: their steps were traced for any number of rows"
_NOT_COMPILED = "XLA does not compile the tasks"
Given = tuple[Any, Any]  # a batch, and the iterator that it came from


class PipelineSteps:
    """Runs the steps of one fit, until one device goes on alone; see :attr:`PipelinePlans.one_device`.

    Args:
        beginning: makes the phase in which there is no plan.

    Attributes:
        may_plan_anew: whether an unplanned step may be planned anew, once in a fit.
        began_s: when the first uncut batch of this fit came.
        first_s, spent_s: seconds of the step traced in this fit, and of all up to the plan beyond a stock
            fit; first_s is 0 if no step was traced, or once that was said.
    """

    def __init__(
        self,
        plans: PipelinePlans,
        first_batch: FirstBatch,
        model: keras.Model,
        beginning: Callable[[PipelineSteps], Training],
    ) -> None:
        self.plans, self.first_batch, self.model = plans, first_batch, model
        self.target, self.options = plans.distributed.target, plans.options
        self.report = plans.distributed.report
        self.may_plan_anew = plans.ranks.engine.size == 1
        self.began_s = self.first_s = self.spent_s = 0.0
        self.beginning = beginning(self)
        self.experiment = Experiment(self.beginning)
        if plans.pipeline is not None:
            self.experiment.enter(Planned(self, plans.pipeline))

    @functools.cached_property
    def seen(self) -> BatchesSeen | None:
        """Return the kinds of batches; None: each is traced by itself."""
        return BatchesSeen() if self.plans.may_leave_rows_open(self.model) else None

    @functools.cached_property
    def never_whole(self) -> bool:
        """Return whether no device may run the whole step; variables must exist, ranks agree."""
        asked, limit_bytes = self.options.first_steps, self.plans.limit.least_bytes
        if asked != "auto":
            return asked == "cut"
        engine = self.plans.ranks.engine
        if engine.size > 1:  # limits may differ among them
            return any(engine.gather(in_host_memory(self.model)))
        too_large = limit_bytes is not None and bytes_of(all_variables(self.model)) > limit_bytes
        return too_large or in_host_memory(self.model)

    def run(self, batch: object, iterator: object) -> Any:
        """Run one step on one batch; return its logs."""
        if self.experiment.phase is not self.beginning:
            self.first_batch.look_at_later(batch, self._moved)
        return self.experiment.run((batch, iterator))

    def functions(
        self, division: Division, replicas: int, seen: BatchesSeen | None, tracing: Tracing
    ) -> StepFunctions:
        """Make the functions of steps, which are traced inside of ``tracing``."""
        plans, model = self.plans, self.model
        applying, loops = plans.ranks.applying(model), plans.loops_of(model)
        functions = StepFunctions(model, division, tracing, applying, replicas, loops)
        functions.seen, functions.kinds = seen, self.first_batch.states.kinds
        return functions

    def placing(self, what: str, traced: bool) -> AbstractContextManager[Any]:
        """Say that the step is placed, also ``traced``; at first with how long it takes and when it pays."""
        first_s, self.first_s = self.first_s, 0.0
        about_s = timing.placing_s(first_s) + (first_s if traced else 0.0)
        stock_s = self.report.baselines_s.get(ONE_DEVICE)
        if not first_s or not stock_s:
            return timing.said(what, about_s)
        spent_s, one_s = self.spent_s + about_s, statistics.median(stock_s)
        return timing.said(what, about_s, timing.pays_from(spent_s, one_s, self.report.predicted_step_s))

    def _moved(self) -> Mapping[int, Any]:
        """Return the present variables by the ``id`` of their old handles. BackendError: a worker is gone."""
        phase = self.experiment.phase
        if not isinstance(phase, Cut):
            return {}
        if self.target.lost():  # a read from it would wait for ever
            raise BackendError("a worker is gone")
        return phase.moved

    def bring_back(self) -> None:
        """Bring the variables back.  BackendError: a variable's worker is gone."""
        if lost := self.experiment.restore():
            raise gone(lost, self.target.explain)


class Planned(Training):
    """Has a plan; the variables are moved for the next step.

    Args:
        before: the step traced for one device, if it may be placed without another trace.
        to_measure: None: costs are already measured, or are not to be.
        uncut: steps of this fit before the plan.
    """

    def __init__(
        self,
        steps: PipelineSteps,
        pipeline: PlannedPipeline,
        before: TracedBefore | None = None,
        to_measure: InPlace | None = None,
        uncut: int = 0,
    ) -> None:
        self._steps, self._pipeline, self._before = steps, pipeline, before
        self._to_measure, self._uncut = to_measure, uncut

    @collector_paused()
    def run(self, given: Given) -> Any:
        """Enter the next phase, and run the first cut step."""
        steps, to_measure = self._steps, self._to_measure
        if (grown := steps.plans.grown_for(given[0])) and to_measure:
            to_measure = None
            steps.report.note(_LARGER)
        cut = Cut(steps, grown or self._pipeline, self._before, to_measure)
        steps.experiment.enter(cut)
        cut.begin()
        return cut.step(given[0])

    def ended(self) -> None:
        self._steps.plans.distributed.note_too_short(self._uncut)


class Cut(Training):
    """Runs cut steps, with the variables on their stages' devices."""

    def __init__(
        self,
        steps: PipelineSteps,
        pipeline: PlannedPipeline,
        before: TracedBefore | None,
        to_measure: InPlace | None,
    ) -> None:
        self._steps, self._pipeline, self._to_measure = steps, pipeline, to_measure
        plans, replicas = steps.plans, pipeline.mesh.replicas
        self._report, self._dump_dir = plans.distributed.describe(), steps.options.dump_dir
        self._step = self._of_fit_before(steps, pipeline.placed) or PlacedStep(steps, pipeline)
        self._step.functions.seen, pipeline.placed = steps.seen, None
        self._placed = Placed(steps.model, steps.target, self._step.moved)
        self._first_traced = first = before if replicas == 1 == plans.replicas_at_first else None
        # Steps that were traced and can be placed without another trace, by the signature of their batches.
        self._before: dict[Any, TracedBefore] = {} if first is None else {first.signature: first}
        self._not_planned = ""  # why the latest step is not the one that was planned; it ran in stock order
        self._pieces = pieces_of(pipeline.mesh, plans.rows, plans.limit.planned_bytes)
        self._devices = len({name for names in pipeline.plan.homes.devices for name in names})
        tracing = functools.partial(steps.placing, f"tracing the step on {self._devices} devices", True)
        self._step.functions.around_traces = tracing

    @staticmethod
    def _of_fit_before(steps: PipelineSteps, placed: PlacedStep | None) -> PlacedStep | None:
        """Return the functions traced for the plan in an earlier fit, if they are still valid."""
        if placed is None or (why := placed.why_not(steps)):
            _LOG.info("the step is traced: %s", "no fit before has" if placed is None else why)
            return None
        for request in placed.requests:
            request.open()
        return placed

    def begin(self) -> None:
        """Move the variables."""
        self._placed.move(self._pipeline.devices)

    @property
    def moved(self) -> Mapping[int, Any]:
        """Return the ``replaced`` of :class:`Moved`."""
        return self._placed.moved.replaced

    def run(self, given: Given) -> Any:
        """Run a step; if a batch is larger than planned, plan for it first."""
        steps = self._steps
        if (grown := steps.plans.grown_for(given[0])) is None:
            return self.step(given[0])
        if self._to_measure is not None:
            steps.report.note(_LARGER)
        steps.bring_back()
        steps.experiment.enter(Planned(steps, grown))
        return steps.experiment.run(given)

    def step(self, batch: object) -> Any:
        """Run a step for which the plan is large enough; afterwards another phase may begin."""
        outputs = self._measured_step(batch)
        if self._not_planned:
            self._forget_plan(self._not_planned)
        elif len(self._pipeline.step_s) == ENOUGH:
            self._look_at_gain()
        return outputs

    def _measured_step(self, batch: object) -> Any:
        """Run a step; if it was planned with calculated costs, up to three of the first are measured."""
        to_measure, timed = self._to_measure, self._pipeline.step_s
        if to_measure is None or not timed or nests.signature(batch) != to_measure.signature:
            return self.cut_step(batch)
        before = len(timed)
        outputs = to_measure.run(lambda: self.cut_step(batch), max(timed))
        if len(timed) > before:
            timed.pop()  # the profiler's
        if to_measure.done:
            self._to_measure, report = None, self._steps.report
            costs = to_measure.costs([node.name for node in report.rewritten_graph.node])
            if costs is None:
                report.note(f"{_CALCULATED}: {to_measure.why_not}")
            else:
                self._take_measured(costs)
        return outputs

    def cut_step(self, batch: object) -> Any:
        """Run one step; return its logs."""
        functions, request = self._step.functions, self._step.request
        before = self._before.pop(nests.signature(batch), None)
        if before is not None:
            compiling = " and compiling its tasks" if self._pipeline.plan.compile_tasks else ""
            with self._steps.placing(f"placing the step on {self._devices} devices{compiling}", False):
                if self._placed_traced_before(before):
                    outputs = functions(batch)
                    nests.synchronize(outputs)
                    self._plan_for_calls()
                    return outputs
        rewritten = request.count
        outputs, seconds, traced = timing.timed_run(lambda: functions(batch), lambda: functions.traced)
        if not traced:
            self._pipeline.step_s.append(seconds)
            return outputs
        request.failures.raise_first()
        if request.count == rewritten:
            if functions.forget_open():  # this step ran on one device, its batch's size gets its own trace
                _LOG.debug("a step of any number of rows cannot be cut: %s", request.skipped)
                return outputs
            if not self._steps.may_plan_anew:
                raise not_cut(request)
            self._not_planned = request.skipped
            return outputs
        self._say_in_report(self._step.said_in_report or request.result)
        if self._pipeline.plan.compile_tasks:
            self._compile_later(batch)
        return outputs

    def _compile_later(self, batch: object) -> None:
        """Compile the next step on such a batch; the first one ran op by op, as it was traced."""
        signature, traced = nests.signature(batch), self._step.request.latest
        concrete = self._step.functions.concrete_of(signature)
        if concrete is None or traced is None or traced.step is None:
            self._report.note(_OP_BY_OP)
        else:
            self._before[signature] = TracedBefore(traced.step, concrete, signature)

    def _say_in_report(self, result: RewriteResult | None) -> None:
        if result is not None:
            self._step.said_in_report = result
            compiled = "" if result.compiled is None else result.compiled.text
            self._report.put(Rewritten(result.moved_ops, result.added_edges, result.graph_def, (), compiled))
            self._report.note(*result.notes)

    def _placed_traced_before(self, before: TracedBefore) -> bool:
        """Return whether the step traced before is placed now, for its first run."""
        try:
            function, result = before.placed(self._pipeline.plan, self.moved, self._dump_dir)
        except OOOError as error:
            _LOG.debug("the step is traced again", exc_info=error)
            if self._pipeline.plan.compile_tasks:
                self._report.note(f"{_NOT_COMPILED}: {in_one_line(error)}", log=logging.WARNING)
            return False
        self._step.functions.untraced[before.signature] = function
        self._say_in_report(result)
        return True

    def _take_measured(self, costs: CostTable) -> None:
        """Adopt a plan from costs measured while this one runs, if it is better."""
        steps, plans = self._steps, self._steps.plans
        try:
            with timing.said("planning again, with measured costs"):
                other = plans.plan_again(costs)
        except OOOError as error:
            steps.report.note(f"the plan with calculated costs stays: {error}")
            return
        if other is not None:
            parts = {pipeline.mesh.wanted.microbatches for pipeline in (self._pipeline, other)}
            steps.bring_back()
            traced = self._first_traced if len(parts) == 1 else None
            steps.experiment.enter(Planned(steps, other, traced))

    def _plan_for_calls(self) -> None:
        """Plan again, once, with the seconds of compiled calls, unless costs are given."""
        plans, result = self._steps.plans, self._step.said_in_report
        given = plans.options.costs is not None or not plans.options.profile_steps
        if given or plans.measured_calls or not (result and result.compiled and plans.planned_from):
            return
        plans.measured_calls = True
        step, costs = plans.planned_from
        with timing.said("measuring the compiled tasks"):
            call_s = call_seconds(result.graph_def)
        self._take_measured(costs_of_calls(step, result.compiled.calls, call_s, costs))

    def _forget_plan(self, why: str) -> None:
        """Forget the plan; the next step is taken apart and planned anew."""
        steps, plans = self._steps, self._steps.plans
        note = f"a step ran in stock order, and the next ones are planned anew: {why}"
        steps.report.note(note, log=logging.WARNING)
        steps.may_plan_anew, plans.planned_from = False, None
        plans.forget()
        steps.bring_back()
        steps.experiment.enter(steps.beginning)

    def _look_at_gain(self) -> None:
        """Say that several devices are slower than one, or return to one."""
        plans, distributed = self._steps.plans, self._steps.plans.distributed
        why = why_back(distributed.describe()) if plans.may_fall_back() else ""
        if why:
            plans.train_on_one_device(why)
        else:
            distributed.say_if_slower()

    def evaluating(self, kind: Kind, function: Function) -> Function:
        """Return the function that evaluates or predicts on the stages' devices; a class's own stays."""
        if makes_its_own(self._steps.model, kind):
            return function
        model, given = self._steps.model, (self._report, self._dump_dir, self._pieces)
        make: Callable[[], Evaluation] = functools.partial(StagedEvaluation, model, kind, *given)
        if kind == "test":
            make = functools.partial(OutputsFirst, model, *given)
        return functools.partial(self._step.evaluation(kind, function, make), function)

    def watched(self) -> Watched | None:
        """Return what a profile shows, once a step of the plan has run without tracing."""
        pipeline, graph = self._pipeline, self._steps.report.rewritten_graph
        if self._to_measure is not None or not pipeline.step_s:
            return None
        target, replicas = self._steps.target, pipeline.mesh.replicas
        return Watched(
            repeated(pipeline.mesh.schedule, pipeline.turns),
            lambda: timed_ops(graph, tasks_of(graph, replicas)),
            pipeline.step_s,
            addresses=target.addresses if isinstance(target, Cluster) else (),
        )

    def ended(self) -> None:
        """Keep the traced step for the next fit; after a failure it may be half done."""
        self._pipeline.placed = self._step
        if self._to_measure is not None:
            self._steps.report.note(f"{_CALCULATED}: the fit had too few steps")
        result = self._step.said_in_report
        if self._pipeline.plan.compile_tasks and self._before and result and result.compiled is None:
            self._report.note(f"{_NOT_COMPILED}: the fit had too few steps")

    def restore(self) -> Sequence[str]:
        """Put the variables back; return the names of lost ones."""
        for request in self._step.requests:
            request.close()
        if lost := self._placed.restore():
            self._pipeline.placed = None
        return lost
